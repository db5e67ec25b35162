"""Finds the JSON value of a reply."""

import json
import re
from typing import Any

_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def json_in(reply: str) -> Any:
    """Return the value of the first block ```json ... ```, or of the whole reply. Raises ValueError without JSON."""
    block = _BLOCK.search(reply)
    try:
        return json.loads(block[1] if block else reply)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
