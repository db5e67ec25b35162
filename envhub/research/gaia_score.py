"""GAIA's quasi-exact match of an answer with the true answer (https://arxiv.org/abs/2311.12983).

The true answer determines the comparison, by the rules of GAIA's own leaderboard:

    a number, such as "1200":         the answer, without $, % and commas, must be the same number: "$1,200.0" matches
    a list with commas or ;, "a, 2":  the same number of members in the same order, each compared as number or text
    a text, such as "St. Ives":       equal without regard to case, white space and punctuation: "st ives" matches

The members of a list keep their punctuation. Two rules differ from the leaderboard. There, a text that is not a number
reads as infinity, so that any text matches the true answer "inf"; and nothing matches the true answer "nan", which
here is a text.
"""

import math
import re
import string

_SEPARATORS = re.compile(r"[,;]")
_SIGNS = re.compile(r"[$%,]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def is_gaia_match(answer: str, true: str) -> bool:
    if _number(true) is not None:
        return _is_same_number(answer, true)
    if _SEPARATORS.search(true):
        members, true_members = _SEPARATORS.split(answer), _SEPARATORS.split(true)
        return len(members) == len(true_members) and all(map(_is_same_member, members, true_members))
    return _plain(answer).translate(_PUNCTUATION) == _plain(true).translate(_PUNCTUATION)


def _is_same_member(answer: str, true: str) -> bool:
    return _is_same_number(answer, true) if _number(true) is not None else _plain(answer) == _plain(true)


def _is_same_number(answer: str, true: str) -> bool:
    number = _number(_SIGNS.sub("", answer))
    return number is not None and number == _number(true)


def _plain(text: str) -> str:
    return "".join(text.lower().split())


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number
