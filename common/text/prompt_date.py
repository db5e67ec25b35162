"""The date that a chat template writes into a prompt is that of the episode's start, on whatever day it is rendered."""

import re
from datetime import datetime
from functools import lru_cache

_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_OTHER_USE = re.compile(r"strftime_now(?!\s+is\s+(not\s+)?defined\b)")


Dated = tuple[str, tuple[tuple[str, str], ...]]  # a template, and the name and value of each of its dates


def dated(template: str, today: datetime) -> Dated:
    """`template` with a variable in place of each call of `strftime_now`, and the variables' values.

    From 5.24 on, transformers passes no functions to templates, only data. Raises ValueError if the template names the
    format of a date otherwise than by a literal.
    """
    text, formats = _with_variables(template)
    return text, tuple((name, today.strftime(form)) for name, form in formats)


@lru_cache(maxsize=16)
def _with_variables(template: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    formats = sorted({call["format"] for call in _CALL.finditer(template)})
    names = {form: f"slipstream_date_{number}" for number, form in enumerate(formats)}
    text = _CALL.sub(lambda call: names[call["format"]], template)
    if other := _OTHER_USE.search(text):
        shown = text[other.start() : other.start() + 60]
        raise ValueError(
            f"the chat template must call strftime_now with a literal format such as '%d %b %Y', got {shown!r}: an "
            "episode keeps the date of its start; use another template"
        )
    return text, tuple((name, form) for form, name in names.items())
