"""The options of one verb: a frozen dataclass, filled from `--option value`. The comment of a field is its help."""

import argparse
import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from slipstream.common.process.config_error import ConfigError
from slipstream.tools.terminal.config_help import comment

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add one option for each field of the dataclass `kind`. A bool, False by default, is a switch."""
    for item in dataclasses.fields(kind):
        text = comment(kind, item.name).replace("%", "%%")
        if item.type is bool:
            parser.add_argument(_flag(item.name), action="store_true", help=text)
        else:
            parse = _words if isinstance(item.default, tuple) else item.type
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
    return kind(**{item.name: getattr(arguments, item.name) for item in dataclasses.fields(kind)})  # type: ignore[arg-type]


def options_from(kind: type[T], values: Mapping[str, object]) -> T:
    """The options of a file: `values` by the name of the field. Raises ConfigError."""
    known = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(f"unknown option `{name}`; {f'did you mean `{near[0]}`?' if near else ', '.join(known)}")
        given[name] = _converted(name, value, known[name].type)
    return kind(**given)


def _converted(name: str, value: object, kind: Any) -> object:
    """`value` as `kind`; a whole number may stand for any number, and YAML reads 1e-3 as text."""
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if type(value) is not kind:
        raise ConfigError(f"option `{name}` must be of type {kind.__name__}, got {value!r}; correct it")
    return value


def as_arguments(options: Any) -> list[str]:
    """The arguments of the command line that `options_of` reads as `options`: those that are not the default."""
    values = {item: getattr(options, item.name) for item in dataclasses.fields(options)}
    return [
        _flag(item.name) if value is True else f"{_flag(item.name)}={_text(value)}"
        for item, value in values.items()
        if value != item.default
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
