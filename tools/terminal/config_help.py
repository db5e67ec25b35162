"""The help on settings: every key with its default and its comment, read from the source of the configuration."""

import functools
import textwrap
from collections.abc import Sequence

from slipstream.common.config.config import Config, key_paths
from slipstream.common.config.setting_bounds import comment

WIDTH = 110


def settings_help(sections: Sequence[str]) -> str:
    """One entry per key that is one of `sections`, or in one of them."""
    lines = []
    for path in key_paths():
        if any(path == section or path.startswith(f"{section}.") for section in sections):
            entry = f"{path} = {_default(path)!r}  {_comment(path)}"
            lines += textwrap.wrap(entry, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def _default(path: str) -> object:
    return functools.reduce(getattr, path.split("."), Config())


def _comment(path: str) -> str:
    """The words and the comment of a key. They are of its section's class, as two sections may share a name."""
    *parents, name = path.split(".")
    return comment(type(functools.reduce(getattr, parents, Config())), name)
