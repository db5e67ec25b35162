"""Imports packages that only one adapter needs, when that adapter is made and not before."""

import importlib
from typing import Any


def require_package(name: str, *, install: str) -> Any:
    """Import and return the module `name`. Raises ValueError, with what to install, if the import fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"this environment needs the package {name}, which cannot be imported: {error}; "
            f"run `pip install {install}` in the environment of the actors"
        ) from error
