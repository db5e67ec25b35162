"""Checks a value against a JSON schema: the part of JSON Schema that the tools need, with clear errors."""

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "string": (str,),
    "integer": (int,),
    "array": (list,),
    "boolean": (bool,),
}


class SchemaError(ValueError):
    """The value does not match its schema; the message says where and why."""


def check_value(value: object, schema: Mapping[str, Any], where: str = "arguments") -> None:
    """Raise SchemaError unless `value` matches `schema`.

    Supported are type, enum, minimum, maximum, maxLength, items, properties and required. An object may have no other
    keys than its properties.
    """
    kinds = _TYPES[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise SchemaError(f"{where} must be of type {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaError(f"{where} must be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise SchemaError(f"{where} is out of range")
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        raise SchemaError(f"{where} is longer than {schema['maxLength']}")
    if isinstance(value, list):
        for position, item in enumerate(value):
            check_value(item, schema["items"], f"{where}[{position}]")
    if isinstance(value, dict):
        _check_object(value, schema, where)


def _check_object(value: Mapping[str, object], schema: Mapping[str, Any], where: str) -> None:
    properties = schema["properties"]
    if missing := [name for name in schema["required"] if name not in value]:
        raise SchemaError(f"{where} lacks {', '.join(missing)}")
    if unknown := [name for name in value if name not in properties]:
        raise SchemaError(f"{where} has an unknown key {unknown[0][:40]!r}")
    for name, item in value.items():
        check_value(item, properties[name], f"{where}.{name}")
