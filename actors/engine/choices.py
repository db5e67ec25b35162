"""The token sequences among which a generation is chosen: what may follow each of their beginnings.

The engine masks the logits, so that it samples from the tokens that may follow. With logits z, the set A of these
tokens and the temperature T:

    p(token) = exp(z[token] / T) / sum over A of exp(z / T)

The engine records the logarithm of this p, and A as the kept set of the token: the learner's softmax runs over the same
tokens. Texts are no part of it, so it is right for every tokenizer, also for one that loses spaces.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

Choices = Sequence[Sequence[int]]


def widest(choices: Choices, *, ends: Collection[int]) -> int:
    """The largest number of tokens among which one is sampled."""
    return max(map(len, following_tokens(choices, ends=ends).values()))


def following_tokens(choices: Choices, *, ends: Collection[int]) -> dict[tuple[int, ...], set[int]]:
    """By the beginning of a choice, the tokens that may follow it."""
    following = defaultdict[tuple[int, ...], set[int]](set)
    for choice in choices:
        for place, token in enumerate(choice):
            following[tuple(choice[:place])].add(token)
        following[tuple(choice)].update(ends)
    return following
