"""The token sequences among which a generation is chosen: what may follow each of their beginnings.

vLLM's structured outputs mask the logits, so that the engine samples from the tokens that may follow. With logits z,
the set A of these tokens and the temperature T:

    p(token) = exp(z[token] / T) / sum over A of exp(z / T)

The engine records the logarithm of this p, and A as the kept set of the token: the learner's softmax runs over the same
tokens. Texts are no part of it, so it is right for every tokenizer, also for one that loses spaces.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Sequence

Choices = Sequence[Sequence[int]]


def allowed_tokens(choices: Choices, written: Sequence[int], *, ends: Collection[int]) -> list[set[int]]:
    """What could be sampled at each place of `written`, one of `choices` with one of `ends` after it, or its beginning.

    Raises ValueError if `written` has another token.

    >>> allowed_tokens([[5, 6], [5], [7]], [5, 9], ends=[9])
    [{5, 7}, {9, 6}]
    """
    following = _following(choices, ends=ends)
    allowed = []
    for place, token in enumerate(written):
        allowed.append(following.get(tuple(written[:place]), set()))
        if token not in allowed[-1]:
            raise ValueError(f"token {token} at place {place} of {list(written)} is in none of the choices")
    return allowed


def widest(choices: Choices, *, ends: Collection[int]) -> int:
    """The largest number of tokens among which one is sampled."""
    return max(map(len, _following(choices, ends=ends).values()))


def structural_tag(choices: Choices) -> str:
    """One of `choices` and nothing else, for vLLM's structured outputs; they add the end-of-turn tokens themselves."""
    sequences = [
        {"type": "sequence", "elements": [{"type": "token", "token": token} for token in choice]} for choice in choices
    ]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": sequences}})


def _following(choices: Choices, *, ends: Collection[int]) -> dict[tuple[int, ...], set[int]]:
    """By the beginning of a choice, the tokens that may follow it."""
    following = defaultdict[tuple[int, ...], set[int]](set)
    for choice in choices:
        for place, token in enumerate(choice):
            following[tuple(choice[:place])].add(token)
        following[tuple(choice)].update(ends)
    return following
