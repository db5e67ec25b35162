"""Compares a reply with the answer of its row. Each check returns a score in [0, 1].

No reply can make a check endless: the checks of this file take time that is linear in the reply, `regex` has a time
limit, mathematics and schemas have the check server, and programs have the sandbox.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any
from unicodedata import normalize

import regex as timed_re
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from slipstream.common.rows.row_source import plain
from slipstream.envhub.dataset.check_client import ask, compared
from slipstream.envhub.dataset.check_server import json_in, marked
from slipstream.envhub.dataset.tests_of_row import passed_share, tests_in
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.sandbox import require_sandbox

Compare = Callable[[str, Any], float]

MAX_REPLY_CHARS = 20_000  # a longer reply is compared by its end
MAX_MATCH_S = 1.0  # of a regular expression on one reply
_CURRENCY = r"$\u20ac\u00a3\u00a5"
# A minus after a letter, a digit or a bracket is a hyphen or an operator: "10-20" ends with 20.
_NUMBER = re.compile(
    rf"(?:(?<![\w)])-[{_CURRENCY}]?)?"
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?:\s?/\s?\d+)?|\.\d+)"
)
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")
# Hyphens, an en dash, a minus sign; and the full-width forms of ASCII.
_PLAIN = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212"), "-") | {
    code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)
}
# Inside a word, "don't" and "U.S."; around it, as emphasis, "_so_".
_INSIDE = re.compile(r"(?<=[^\W\d_])['\u2019.](?=[^\W\d_])|(?<!\w)_+|_+(?!\w)")
_INLINE = re.compile(r"\$([^$\n]+)\$(?!\d)")  # mathematics in LaTeX, unlike "$5 or $6"
_SIGNS = rf"%{_CURRENCY}&+/<=>@\\^|~"
_LETTERS = rf"[^\s{_SIGNS}.,;:!?'\"()\[\]{{}}`*#\-\u2014\u2018-\u201e\u2026\u00ab\u00bb\u00bf\u00a1\u3001\u3002]"
# Digits that signs join ("-5", "1,234.5", "3 / 4", "20:25", "10-20"), words, and signs. What is between is punctuation.
_WORD = re.compile(
    r"(?:(?<![\w)])[-+])?(?:(?<![\w.])\.)?\d+(?:(?: [-/] |[^\w\s])\d+|e[-+]?\d+)*"
    rf"|{_LETTERS}+(?:\.{_LETTERS}+)*|[{_SIGNS}]"
    rf"|(?<![^\W\d_])-(?=\s*(?:\(|[{_CURRENCY}]?\s*\.?\d))|(?<![\w)\]\-])-(?=\\|{_LETTERS})"
    r"|(?<=\w)\*(?=\w)|(?<=\w )\*(?= \w)|(?<=\w)#"
)
_ARTICLES = {("a",), ("an",), ("the",)}
RELATIVE_ERROR = 1e-6  # of numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """How a reply is compared with the answer of its row."""

    compare: Callable[[str, Any], Awaitable[float]]
    accept: Callable[[Any], object]  # raises ValueError for an answer that the check cannot compare with
    reply: Callable[[str], str] | None  # a right reply, from the answer's text; None: the answer is no reply
    has_alternatives: bool = True  # an answer that is a list contains alternatives: the best of them counts
    max_tried: int | None = None  # rows whose answer is tried at the start; None: all
    require: Callable[[], None] = lambda: None  # raises ValueError if this host cannot run it

    async def score(self, reply: str, answer: Any) -> float:
        """Return the score of `reply`. Raises ValueError if `answer` is not one that the check can compare with."""
        reply = reply[-MAX_REPLY_CHARS:]
        return max([await self.compare(reply, each) for each in self.alternatives(answer)], default=0.0)

    def alternatives(self, answer: Any) -> list[Any]:
        return answer if self.has_alternatives and isinstance(answer, list) else [answer]


def compiled(where: str, text: str, *, flags: int = 0) -> "timed_re.Pattern[str]":
    """Return the regular expression `text`. Raises ValueError if it is malformed; `where` says which one it is."""
    try:
        return timed_re.compile(text, flags)
    except timed_re.error as error:
        raise ValueError(f"{where} {text!r} is not a regular expression: {error}") from None


def exact(reply: str, answer: Any) -> float:
    """1 if both have the same words and numbers, without regard to case, sentence punctuation and articles.

    SQuAD's exact match, in which 5 is not -5, 314 is not 3.14, and 72 is 72.0.
    """
    return float(_words(reply) == _words(str(answer)))


def f1(reply: str, answer: Any) -> float:
    """The harmonic mean of precision and recall of words (SQuAD, https://arxiv.org/abs/1606.05250)."""
    given, wanted = _words(reply), _words(str(answer))
    common = sum((Counter(given) & Counter(wanted)).values())
    if not given or not wanted:
        return float(given == wanted)
    return 2.0 * common / (len(given) + len(wanted))


def number(reply: str, answer: Any) -> float:
    """1 if the last numbers in both are equal, up to a relative error of 1e-6. 1,234, 3/4 and 1e-3 are numbers."""
    wanted = last_number(str(answer))
    if wanted is None:
        raise ValueError(f"the answer {answer!r} contains no number")
    given = last_number(reply)
    return float(given is not None and math.isclose(given, wanted, rel_tol=RELATIVE_ERROR, abs_tol=1e-12))


def last_number(text: str) -> float | None:
    """The last number in `text`; None if no number is there, or it has no value. U+2212 counts as a minus sign."""
    found = _NUMBER.findall(text.translate(_PLAIN))
    value = _value(found[-1]) if found else None
    return None if value is None else float(value)


def choice(reply: str, answer: Any) -> float:
    """1 if the last capital letter that stands alone, as in "(B)" or "the answer is B", is the answer's."""
    wanted = _LETTER.findall(str(answer))
    if len(wanted) != 1:
        raise ValueError(f"the answer {answer!r} is not one capital letter")
    return float(_LETTER.findall(reply)[-1:] == wanted)


def matches(reply: str, answer: Any) -> float:
    """1 if the regular expression `answer` matches somewhere in the reply, within a second."""
    try:
        return float(_pattern(answer).search(reply, timeout=MAX_MATCH_S, concurrent=True) is not None)
    except TimeoutError:
        return 0.0


def _pattern(answer: Any) -> "timed_re.Pattern[str]":
    return compiled("the answer", str(answer))


def same_json(reply: str, answer: Any) -> float:
    """1 if the reply is JSON, perhaps in a block ```json ... ```, with the value of `answer`. Null fields are none.

    An answer that is a text must be JSON too; write an answer that is a list as such a text.
    """
    try:
        wanted = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer {answer!r:.200} is not JSON: {error}") from None
    try:
        return float(_is_same(plain(json_in(reply)), plain(wanted)))
    except (ValueError, RecursionError):
        return 0.0


def schema_of(answer: Any) -> Any:
    """Return the JSON schema of an answer, which may be its text. Raises ValueError if it is malformed."""
    try:
        found = json.loads(answer) if isinstance(answer, str) else answer
        if not isinstance(found, dict | bool):
            raise ValueError("it must be an object")
        validator_for(found).check_schema(found)
    except (ValueError, RecursionError, SchemaError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise ValueError(f"the answer {answer!r:.200} is not a JSON schema: {reason}"[:500]) from None
    return found


def _words(text: str) -> list[Hashable]:
    """The words without case, sentence punctuation and articles; of a text that has nothing else, like "!", all of it.

    A number is its value, so that 72 is 72.0, and whatever else has digits, such as 20:25, is the tuple of its parts.
    """
    plain = _INLINE.sub(r"\1", _INSIDE.sub("", normalize("NFC", text).lower().translate(_PLAIN)))
    found: list[Hashable] = []
    for word in _WORD.findall(plain):
        parts = [word] if _is_number(word) else re.split("[,;]", word)  # 1,234 is a number, 1,2 are two
        found += [_value(part) if _is_number(part) else _pieces(part) for part in parts]
    return [word for word in found if word not in _ARTICLES] or found or list(text.lower().split())


def _pieces(word: str) -> tuple[Decimal | str, ...]:
    pieces = filter(None, re.split(r"\s*(\d+)\s*", word))
    return tuple(Decimal(piece) if piece.isdecimal() else piece for piece in pieces)


def _is_number(word: str) -> bool:
    return _NUMBER.fullmatch(word.removeprefix("+")) is not None and _value(word) is not None


def _value(number: str) -> Decimal | None:
    """The value of what `_NUMBER` matches; None for a fraction of 0."""
    numerator, has_divisor, denominator = re.sub(f"[,{_CURRENCY}]", "", number).partition("/")
    if not has_divisor:  # a division would round to 28 digits
        return Decimal(numerator)
    return Decimal(numerator) / Decimal(denominator) if Decimal(denominator) else None


def _is_same(one: Any, other: Any) -> bool:
    """Equality of JSON values, in which `true` is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _passes(compare: Compare, answer: Any) -> None:
    """Raise ValueError if no reply could be right, as the answer itself is not."""
    if compare(answer if isinstance(answer, str) else json.dumps(answer), answer) < 1.0:
        raise ValueError(f"the answer {answer!r} fails its own check `env.options.check`"[:500])


def _is_mathematics(answer: Any) -> None:
    try:
        _passes(lambda reply, wanted: ask("math", marked(reply), wanted), str(answer))
    except EnvError as error:
        raise ValueError(str(error)) from error


def immediate(compare: Compare) -> Check:
    """A check whose answers are replies, which must pass it themselves."""

    async def compare_now(reply: str, answer: Any) -> float:
        return compare(reply, answer)

    return Check(compare=compare_now, accept=partial(_passes, compare), reply=str)


async def _fits_schema(reply: str, answer: Any) -> float:
    return await compared("schema", reply, schema_of(answer))


CHECKS: dict[str, Check] = {
    "exact": immediate(exact),
    "f1": immediate(f1),
    "number": immediate(number),
    "math": Check(compare=partial(compared, "math"), accept=_is_mathematics, reply=marked, max_tried=20),
    "choice": immediate(choice),
    "regex": Check(
        compare=lambda reply, answer: asyncio.to_thread(matches, reply, answer), accept=_pattern, reply=None
    ),
    "json": immediate(same_json),
    "schema": Check(compare=_fits_schema, accept=schema_of, reply=None),
    "code": Check(compare=passed_share, accept=tests_in, reply=None, has_alternatives=False, require=require_sandbox),
}
