"""Reads a YAML file of the user's."""

from pathlib import Path
from typing import Any

import yaml

from slipstream.common.process.config_error import ConfigError, reason

UNREADABLE = (yaml.YAMLError, OSError, ValueError, RecursionError)  # ValueError: no UTF-8, or a date such as 2026-13-01


def read_yaml(path: Path, where: str) -> Any:
    """The content of the file `path`. Raises ConfigError, with `where` in front of the path."""
    try:
        return yaml.safe_load(path.read_text())
    except UNREADABLE as error:
        raise ConfigError(f"{where}{path} cannot be read: {reason(error)}; correct it") from None
