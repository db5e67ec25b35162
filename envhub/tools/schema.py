"""Checks the arguments of a call against the JSON schemas of a tool's properties, which are texts and whole numbers."""

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, type] = {"string": str, "integer": int}


def check_arguments(arguments: Mapping[str, object], properties: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError, with the reason, unless each property has a value of its schema, and nothing else has one.

    A schema may have type, enum, minimum, maximum and maxLength.
    """
    if missing := [name for name in properties if name not in arguments]:
        raise ValueError(f"arguments lacks {', '.join(missing)}")
    if unknown := [name for name in arguments if name not in properties]:
        raise ValueError(f"arguments has an unknown key {unknown[0][:40]!r}")
    for name, value in arguments.items():
        _check_value(value, properties[name], f"arguments.{name}")


def _check_value(value: object, schema: Mapping[str, Any], where: str) -> None:
    if not isinstance(value, _TYPES[schema["type"]]) or isinstance(value, bool):
        raise ValueError(f"{where} must be of type {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {', '.join(schema['enum'])}")
    if isinstance(value, int) and not schema["minimum"] <= value <= schema["maximum"]:
        raise ValueError(f"{where} is out of range")
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        raise ValueError(f"{where} is longer than {schema['maxLength']}")
