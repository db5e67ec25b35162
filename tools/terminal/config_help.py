"""The help on settings: every key with its default and its comment, read from the source of the configuration."""

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Sequence

from slipstream.common.config.config import Config, key_paths

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
    """The comment of a key. It is searched in the class of the key's section, as two sections may share a name."""
    *parents, name = path.split(".")
    return comment(type(functools.reduce(getattr, parents, Config())), name)


def comment(section: type, name: str) -> str:
    """The comment after the field `name` of a dataclass, or of one that it inherits from."""
    sources = (_source(kind) for kind in section.__mro__ if dataclasses.is_dataclass(kind))
    found = (re.search(rf"^    {name}: [^\n]*?  # (.+)$", source, re.MULTILINE) for source in sources)
    return next((match.group(1) for match in found if match), "")


@functools.cache
def _source(section: type) -> str:
    return inspect.getsource(section)
