"""Compares a reply with the answer of its row. Each check returns a score in [0, 1].

An answer that is a list contains alternatives: the best of them counts.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], float]

MAX_REPLY_CHARS = 20_000  # a longer reply is compared by its end
# A minus after a letter, a digit or a bracket is a hyphen or an operator: "10-20" ends with 20.
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?:\s?/\s?\d+)?|\.\d+)"
)
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
RELATIVE_ERROR = 1e-6  # of numbers


def score(check: Check, reply: str, answer: Any) -> float:
    """Return the score of `reply`. Raises ValueError if `answer` is not one that `check` can compare with."""
    reply = reply[-MAX_REPLY_CHARS:]
    if isinstance(answer, list):
        return max((check(reply, each) for each in answer), default=0.0)
    return check(reply, answer)


def exact(reply: str, answer: Any) -> float:
    """1 if both have the same words, without regard to case, punctuation and articles (SQuAD's exact match)."""
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
    """The last number in `text`; None if there is none, or it has no value."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    divisor = float(denominator or 1)
    return float(numerator) / divisor if divisor else None


def choice(reply: str, answer: Any) -> float:
    """1 if the last capital letter that stands alone, as in "(B)" or "the answer is B", is the answer's."""
    wanted = _LETTER.findall(str(answer))
    if len(wanted) != 1:
        raise ValueError(f"the answer {answer!r} is not one capital letter")
    return float(_LETTER.findall(reply)[-1:] == wanted)


def regex(reply: str, answer: Any) -> float:
    """1 if the regular expression `answer` matches somewhere in the reply."""
    try:
        return float(re.search(str(answer), reply) is not None)
    except re.error as error:
        raise ValueError(f"the answer {answer!r} is not a regular expression: {error}") from None


def same_json(reply: str, answer: Any) -> float:
    """1 if the reply is JSON, perhaps in a block ```json ... ```, with the value of `answer`.

    An answer that is a text must be JSON too; write an answer that is a list as such a text.
    """
    try:
        wanted = json.loads(answer) if isinstance(answer, str) else answer
    except ValueError as error:
        raise ValueError(f"the answer {answer!r} is not JSON: {error}") from None
    block = re.search(r"```(?:json)?\s*\n(.*?)```", reply, re.DOTALL)
    try:
        return float(_is_same(json.loads(block[1] if block else reply), wanted))
    except (ValueError, RecursionError):
        return 0.0


CHECKS: dict[str, Check] = {
    "exact": exact,
    "f1": f1,
    "number": number,
    "choice": choice,
    "regex": regex,
    "json": same_json,
}
ANSWER_IS_NO_REPLY = (regex,)  # the answers of these checks need not be right themselves


def _words(text: str) -> list[str]:
    """The words without case, punctuation and articles; of a text that has nothing else, such as "+", all of it."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split() or text.lower().split()


def _is_same(one: Any, other: Any) -> bool:
    """Equality of JSON values, in which `true` is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
