"""Imports what a table of ours, or a configuration, names as `module:NAME`."""

import difflib
import functools
import hashlib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from slipstream.common.process.config_error import ConfigError, require

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOUNS: dict[object, str] = {type: "class", Callable: "function"}


@functools.cache
def loaded(place: str) -> Callable[..., Any]:
    """What is at `module:NAME` of ours, imported when it is first needed."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def place_of(error: BaseException) -> str:
    """FILE:LINE where the user's code raised `error`, or called the library that did; else where it was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, line = ([each for each in frames if _is_users(each[0])] or frames)[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _is_users(frame: FrameType) -> bool:
    known = frame.f_globals.get("__spec__")  # a program of ours is "__main__" by its `__name__`
    is_ours = str(getattr(known, "name", frame.f_globals.get("__name__"))).startswith("slipstream.")
    return not is_ours and not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def is_own(name: str) -> bool:
    """Whether `name` is a `module:NAME` of the user's, not a built-in part."""
    return ":" in name


def import_own(name: str) -> ModuleType:
    """Import a module that may be a file in the working directory, which is searched after all other places."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def imported(key: str, name: object, kind: Any) -> Any:
    """Import and return `module:NAME`, the value of `key`; it must be a `kind`: `type`, `Callable` or a class.

    Raises ConfigError if the import fails, or the module has no such thing.
    """
    module_name, _, attribute = str(name).partition(":")
    is_name = all(part.isidentifier() for part in (*module_name.split("."), attribute))
    require(is_name, key, "module:NAME", name, "write it as in my_envs.maze:MazeEnv")
    try:
        module = import_own(module_name)
        found = getattr(module, attribute, None)  # some packages import what they have only now
    except ImportError as error:
        is_itself = error.name is not None and module_name.startswith(error.name)
        hint = "is its folder on PYTHONPATH?" if is_itself else f"{module_name} imports the missing module; install it"
        raise ConfigError(f"`{key}` {name!r}: cannot import {module_name}: {error}; {hint}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything, as one that reads `sys.argv` does
        raise ConfigError(
            f"`{key}` {name!r}: cannot import {module_name}: {type(error).__name__}: {error}; correct the module"
        ) from error
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"did you mean {near[0]}?" if near else f"define it in {module_name}"
        raise ConfigError(f"`{key}` {name!r}: {module_name} has no {attribute}; {hint}")
    noun = _NOUNS.get(kind) or kind.__name__
    if not isinstance(found, kind):
        raise ConfigError(
            f"`{key}` {name!r}: {attribute} must be a {noun}, got {type(found).__name__}; change it in {module_name}"
        )
    return found


def digest_of(name: str) -> str:
    """A digest of the file that defines `module:NAME`; not of the modules that this file imports."""
    file = import_own(name.partition(":")[0]).__file__
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else "unknown"


def code_of(rooms: Iterable[str]) -> str:
    """A digest of Slipstream's own code in `rooms`, such as `common`: of Python and of the scripts for Redis."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    files = [path for room in rooms for kind in ("*.py", "*.lua") for path in (root / room).rglob(kind)]
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
