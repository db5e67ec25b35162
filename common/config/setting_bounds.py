"""Ranges that stand beside the settings and options that they bound, as in `steps: Count = 100`."""

import dataclasses
import functools
import inspect
import math
import operator
import re
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Interval

from slipstream.common.process.config_error import require

Count = Annotated[int, Ge(1)]
Finite = Annotated[float, Interval()]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
AtLeast1 = Annotated[float, Ge(1)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
ShareBelow1 = Annotated[float, Interval(ge=0, lt=1)]
InnerShare = Annotated[float, Interval(gt=0, lt=1)]
Port = Annotated[int, Interval(ge=0, le=65535)]
_source = functools.cache(inspect.getsource)
_HOLDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


def check_bounds(section: Any, prefix: str) -> None:
    """Raise ConfigError for the first field of a dataclass whose value is out of its bounds, or none of its words.

    A number with bounds must be finite, and none may be NaN. `prefix` comes before the field's name: `replay.` of a
    section, `--` of a verb's options.
    """
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if contract := _broken(item.type, value):
            name = item.name.replace("_", "-") if prefix == "--" else item.name
            cure = f"{item.default!r} is the default: {comment(type(section), item.name)}"
            require(False, f"{prefix}{name}", contract, value, cure)


def plain_type(annotated: Any) -> Any:
    """The type without its bounds; that of words is `str`."""
    if get_origin(annotated) is Literal:
        return str
    return get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated


def comment(section: type, name: str) -> str:
    """What the field `name` of a dataclass can be, if it is a word, and the comment after it or what it overrides."""
    sources = (_source(kind) for kind in section.__mro__ if dataclasses.is_dataclass(kind))
    found = (re.search(rf"^    {name}: [^\n]*?  # (.+)$", source, re.MULTILINE) for source in sources)
    written = next((match.group(1) for match in found if match), "")
    annotated = next((item.type for item in dataclasses.fields(section) if item.name == name), None)
    return f"{_either(annotated)}; {written}" if get_origin(annotated) is Literal else written


def _broken(annotated: Any, value: Any) -> str:
    """What `value` must be and is not; empty if it is."""
    if get_origin(annotated) is Literal:
        return "" if value in get_args(annotated) else _either(annotated)
    if get_origin(annotated) is not Annotated or value is None:
        return "a number" if isinstance(value, float) and math.isnan(value) else ""
    bound = get_args(annotated)[1]
    limits = {name: limit for name in _HOLDS if (limit := getattr(bound, name, None)) is not None}
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "below 2**63"
    if not math.isfinite(value):
        return "finite"
    return "" if all(_HOLDS[name](value, limit) for name, limit in limits.items()) else _in_words(limits)


def _either(literal: Any) -> str:
    *words, last = get_args(literal)
    return f"{', '.join(words)} or {last}"


def _in_words(limits: dict[str, Any]) -> str:
    if not limits.keys() & {"le", "lt"}:
        return f">= {limits['ge']}" if "ge" in limits else f"> {limits['gt']}"
    left = f"[{limits['ge']}" if "ge" in limits else f"({limits['gt']}"
    right = f"{limits['le']}]" if "le" in limits else f"{limits['lt']})"
    return f"in {left}, {right}"
