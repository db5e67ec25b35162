"""The help on settings: every key with its default and its comment, read from the source of the configuration."""

import dataclasses
import textwrap
from collections.abc import Sequence

from slipstream.common.config.config import Config, key_paths, value_of
from slipstream.common.config.setting_bounds import comment
from slipstream.common.config.suggestion import SETTINGS, setting_hint, word_hint

WIDTH = 80


def settings_topic(topic: str, read: Sequence[str]) -> str:
    """The settings of `topic`: a section, a key, or `all`, which is those of the sections and keys `read` if any."""
    key, sections = topic.partition("=")[0], [item.name for item in dataclasses.fields(Config)]
    if key == "all":
        return settings_help(read or sections)
    if found := settings_help([key]):
        return found
    hint = setting_hint(key, "", key_paths()) if key in SETTINGS else word_hint(key, sections)
    return f"no settings under `{key}`{hint}; --help all lists every one, of {', '.join(sections)}"


def settings_help(sections: Sequence[str]) -> str:
    """One entry per key that is one of `sections`, or in one of them."""
    lines = []
    for path in key_paths():
        if any(path == section or path.startswith(f"{section}.") for section in sections):
            section, _, name = path.rpartition(".")
            words = comment(type(value_of(Config(), section)), name)  # of its class: two sections may share a name
            entry = f"{path} = {value_of(Config(), path)!r}  {words}"
            lines += textwrap.wrap(entry, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)
