"""Shared prefixes: tokens that several sequences of a pack begin with pass through the model once.

Siblings begin with the same prompt, and often with the same turns; the attempts of a tree share more. The state of a
token depends only on the tokens before it, so sequences that begin alike have the same states there. Each layer
computes them once; attention copies their keys and values to every sequence. Losses are still counted by sequence.

In lexicographic order, what a sequence shares with any earlier one, it also shares with the one just before it.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.common.records.trajectory import TokenArray
from slipstream.learner.ranks.context import on_device

# What a shared token costs a sequence that does not compute it, as a fraction of a computed token: its key and value
# are copied in every layer. They are at most 2 of the 16 or more numbers per unit of width that a layer keeps for the
# backward pass. So a micro-batch that is full by this measure needs no more memory than one without sharing.
COPY_COST = 1 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefixes:
    """Which tokens of a pack are computed: all but those of prefixes that an earlier sequence has as well."""

    computed: Int[Tensor, " computed"]  # their positions in the pack
    places: Int[Tensor, " tokens"]  # of each token of the pack, or of its first copy, among the computed
    bounds: Int[Tensor, " bounds"]  # where the computed tokens of each sequence begin, and where the last ones end
    lengths: tuple[int, ...]  # computed tokens of each sequence; on the host, so that no kernel waits for them

    def to(self, device: torch.device) -> "Prefixes":
        """The same on `device`: see `Packed.to`."""
        computed, places, bounds = (on_device(each, device) for each in (self.computed, self.places, self.bounds))
        return dataclasses.replace(self, computed=computed, places=places, bounds=bounds)


def lexicographic(sequences: Sequence[TokenArray]) -> list[int]:
    """The order of `sequences` by their tokens: indices, of which neighbours share the longest prefixes.

    >>> lexicographic([np.array([7, 9]), np.array([7]), np.array([2, 300])])
    [2, 1, 0]
    """
    keys = [tokens.astype(">u4").tobytes() for tokens in sequences]  # the highest byte first
    return sorted(range(len(keys)), key=keys.__getitem__)


def shared_lengths(ordered: Sequence[TokenArray]) -> list[int]:
    """How many tokens each of the `lexicographic` sequences shares with the one before it; never all of its own.

    >>> shared_lengths([np.array([7]), np.array([7, 9]), np.array([7, 9])])
    [0, 1, 1]
    """
    first = [0] if ordered else []
    return first + [min(_common(*pair), len(pair[1]) - 1) for pair in pairwise(ordered)]


def prefixes_of(lengths: Sequence[int], shared: Sequence[int]) -> Prefixes:
    """The layout of sequences of `lengths`, of which each has its first `shared` tokens from the one before it.

    Sequences of 3 and 4 tokens, of which 2 are shared: computed (0, 1, 2, 5, 6), places (0, 1, 2, 0, 1, 3, 4),
    lengths (3, 2).
    """
    places: list[Int[np.ndarray, " _length"]] = []
    computed: list[Int[np.ndarray, " _length"]] = []
    start = num_computed = 0
    for length, num_shared in zip(lengths, shared, strict=True):
        own = np.arange(length - num_shared)
        before = places[-1][:num_shared] if num_shared else own[:0]
        places.append(np.concatenate([before, num_computed + own]))
        computed.append(start + num_shared + own)
        start, num_computed = start + length, num_computed + len(own)
    own_lengths = tuple(len(own) for own in computed)
    return Prefixes(
        computed=torch.from_numpy(np.concatenate(computed)),
        places=torch.from_numpy(np.concatenate(places)),
        bounds=torch.tensor([0, *own_lengths]).cumsum(0).int(),
        lengths=own_lengths,
    )


def costs_of(lengths: Sequence[int], shared: Sequence[int]) -> list[float]:
    """What each sequence costs in computed tokens, if the one before it is in the same pack: see COPY_COST.

    >>> costs_of([10, 10], [0, 8])
    [10.0, 3.0]
    """
    return [length - (1 - COPY_COST) * num_shared for length, num_shared in zip(lengths, shared, strict=True)]


def runs_of(lengths: Sequence[int], shared: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[range]:
    """Cut the sequences into runs of neighbours, each a pack of at most `max_tokens`; the fullest runs come first.

    There are as few as `max_tokens` allows, rounded up to a multiple of `num_ranks`, and the fullest one is as small as
    that number allows. A run computes the shared prefix of its first sequence. No sequence is longer than `max_tokens`.
    """
    costs = costs_of(lengths, shared)
    most = -(-len(_filled(lengths, costs, max_tokens)) // num_ranks) * num_ranks
    limits = range(max(lengths), max_tokens + 1)
    least = bisect.bisect_left(limits, True, key=lambda limit: len(_filled(lengths, costs, limit)) <= most)
    runs = _filled(lengths, costs, limits[least])
    runs += [range(0)] * (most - len(runs))
    return sorted(runs, key=lambda run: -cost_of(run, lengths, costs))


def cost_of(run: range, lengths: Sequence[int], costs: Sequence[float]) -> float:
    """What a run costs, in computed tokens."""
    return lengths[run[0]] + sum(costs[index] for index in run[1:]) if run else 0.0


def _filled(lengths: Sequence[int], costs: Sequence[float], limit: int) -> list[range]:
    """The fewest runs that cost at most `limit`: a run ends only where the next sequence does not fit."""
    runs, start, load = [], 0, 0.0
    for index, cost in enumerate(costs):
        if index > start and load + cost > limit:
            runs.append(range(start, index))
            start = index
        load = lengths[index] if index == start else load + cost
    return [*runs, range(start, len(costs))]


def _common(first: TokenArray, second: TokenArray) -> int:
    length = min(len(first), len(second))
    differing = first[:length] != second[:length]
    return int(differing.argmax()) if differing.any() else length
