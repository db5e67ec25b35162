"""The options of one verb: a frozen dataclass, filled from `--option value`. The comment of a field is its help."""

import argparse
import dataclasses
from typing import Any, TypeVar

from slipstream.common.config.config_merge import with_home
from slipstream.common.config.setting_bounds import check_bounds, comment, plain_type
from slipstream.common.process.config_error import require

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add one option for each field of the dataclass `kind`. A bool, False by default, is a switch."""
    for item in dataclasses.fields(kind):
        text = comment(kind, item.name).replace("%", "%%")
        kind_of_value = plain_type(item.type)
        if kind_of_value is bool:
            parser.add_argument(_flag(item.name), action="store_true", help=text)
        else:
            parse = _words if isinstance(item.default, tuple) else kind_of_value
            metavar = "A,B,..." if parse is _words else item.name.rpartition("_")[2].upper()
            parser.add_argument(
                _flag(item.name),
                type=parse,
                default=item.default,
                metavar=metavar,
                help=f"{text} (default: {_text(item.default) or 'empty'})",
            )


def options_of(kind: type[T], arguments: argparse.Namespace) -> T:
    """The parsed options. Raises ConfigError."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: with_home(getattr(arguments, name)) for name in names})


def check_options(options: Any, *rules: tuple[str, bool, str, str]) -> None:
    """Raise ConfigError for a value out of its bounds, or for the first rule that does not hold.

    A rule is the name of a field, whether it holds, what the value must be, and what to do.
    """
    check_bounds(options, "--")
    for name, holds, contract, cure in rules:
        value = getattr(options, name)
        require(holds, _flag(name), contract, _text(value) if isinstance(value, tuple) else value, cure)


def as_arguments(options: Any) -> list[str]:
    """The arguments of the command line that `options_of` reads as `options`: those that are not the default."""
    values = ((item, getattr(options, item.name)) for item in dataclasses.fields(options))
    changed = {_flag(item.name): value for item, value in values if value != item.default}
    return [flag if value is True else f"{flag}={_text(value)}" for flag, value in changed.items()]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
