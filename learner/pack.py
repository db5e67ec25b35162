"""Token sequences laid end to end: the only layout of a batch, without padding.

`tokens` of all sequences follow one another, longest sequence first; `lengths` says where each ends, and
`position_ids` start again at 0 in each. Element i of every per-token array belongs to `tokens[i]`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from common.kept_sets import KeptSets, joined
from common.trajectory import LogprobArray, MaskArray, TokenArray, Trajectory
from learner.objective.ratio import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """What one forward pass reads from its first token on, and what the loss needs to know about each token."""

    tokens: TokenArray
    loss_mask: MaskArray  # True on tokens the policy sampled and that are trained; never on the first
    behaviour_logprobs: LogprobArray  # of the policy that sampled; 0 elsewhere
    advantages: LogprobArray
    old_values: LogprobArray | None = None  # the critic's at the start of the step; None without one
    returns: LogprobArray | None = None  # what the critic is trained towards
    kept: KeptSets | None  # of the loss tokens; None where the policy chose from the whole vocabulary

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences end to end, as one micro-batch."""

    tokens: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]  # 0, 1, 2, ... from the start of each sequence
    loss_mask: Bool[Tensor, " tokens"]
    behaviour_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    old_values: Float[Tensor, " tokens"] | None = None
    returns: Float[Tensor, " tokens"] | None = None
    # The ids that each loss token was chosen from, filled up with -1; None where that was the whole vocabulary.
    kept: Int[Tensor, "loss_tokens width"] | None
    lengths: tuple[int, ...]  # tokens of each sequence; on the host, so that no kernel waits for them

    def to(self, device: torch.device) -> "Packed":
        parts = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        tensors: dict[str, Any] = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
        return dataclasses.replace(self, **tensors)

    @property
    def loss_sequences(self) -> Sequences:
        """Which sequence each loss token belongs to."""
        num, device = len(self.lengths), self.tokens.device
        ids = torch.arange(num, device=device).repeat_interleave(
            torch.tensor(self.lengths, device=device), output_size=len(self.tokens)
        )
        return Sequences(ids=ids[self.loss_mask], num=num)


def sequences_of(
    trajectory: Trajectory,
    *,
    advantage: float | LogprobArray,
    old_values: LogprobArray | None = None,
    returns: LogprobArray | None = None,
) -> list[TokenSequence]:
    """The branches of a trajectory, each a sequence of its own; `advantage` is every token's, or one for each.

    `old_values` and `returns` have an element for each token of the trajectory.

    Raises ValueError where a sampled token begins a branch: nothing would have predicted it.
    """
    tokens, loss_mask = trajectory.token_array(), trajectory.loss_mask_array()
    behaviour_logprobs = trajectory.behaviour_logprob_array()
    advantages = np.broadcast_to(np.asarray(advantage, dtype=np.float32), tokens.shape)
    stops = [*trajectory.branch_starts[1:], trajectory.num_tokens]
    sequences, num_sampled = [], np.concatenate([[0], loss_mask.cumsum()])
    for start, stop in zip(trajectory.branch_starts, stops, strict=True):
        if loss_mask[start]:
            raise ValueError(
                f"group {trajectory.group_id}, member {trajectory.member}: token {start} begins a sequence and has "
                "loss_mask True; a sampled token needs a prompt before it"
            )
        sequences.append(
            TokenSequence(
                tokens=tokens[start:stop],
                loss_mask=loss_mask[start:stop],
                behaviour_logprobs=behaviour_logprobs[start:stop],
                advantages=advantages[start:stop],
                old_values=None if old_values is None else old_values[start:stop],
                returns=None if returns is None else returns[start:stop],
                kept=trajectory.kept and trajectory.kept.between(int(num_sampled[start]), int(num_sampled[stop])),
            )
        )
    return sequences


def count_loss_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(int(sequence.loss_mask.sum()) for sequence in sequences)


def count_sequences(sequences: Sequence[TokenSequence]) -> int:
    """Those with a token to train."""
    return sum(bool(sequence.loss_mask.any()) for sequence in sequences)


def pack(sequences: Sequence[TokenSequence]) -> Packed:
    """Lay `sequences` end to end, longest first: attention then finds sequences of like length side by side.

    No sequences give a pack of one token without loss, for a rank that has nothing to do in a step that all share.
    """
    if not sequences:
        sequences = [_NOTHING]
    ordered = sorted(sequences, key=lambda sequence: -sequence.num_tokens)
    per_token = {
        item.name: _joined([getattr(sequence, item.name) for sequence in ordered])
        for item in dataclasses.fields(TokenSequence)
        if item.name != "kept" and getattr(ordered[0], item.name) is not None
    }
    return Packed(
        **per_token | {"tokens": per_token["tokens"].long()},
        position_ids=torch.cat([torch.arange(sequence.num_tokens) for sequence in ordered]),
        kept=_kept_ids([sequence for sequence in ordered if sequence.loss_mask.any()]),
        lengths=tuple(sequence.num_tokens for sequence in ordered),
    )


def micro_batches(sequences: Sequence[TokenSequence], *, max_tokens: int, num_ranks: int, rank: int) -> list[Packed]:
    """This rank's share of `sequences`, which every rank passes whole and in the same order.

    Every rank gets the same number of packs, as the collectives inside a forward pass need it, and about the same
    number of tokens. Raises ValueError for a sequence longer than `max_tokens`.
    """
    bins = bins_of_rank(sequences, max_tokens=max_tokens, num_ranks=num_ranks, rank=rank)
    return [pack([sequences[index] for index in members]) for members in bins]


def bins_of_rank(sequences: Sequence[TokenSequence], *, max_tokens: int, num_ranks: int, rank: int) -> list[list[int]]:
    """What each of this rank's `micro_batches` is made of: indices into `sequences`, in the order of the pack."""
    lengths = [sequence.num_tokens for sequence in sequences]
    bins = balanced_bins(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    return [sorted(members, key=lambda index: -lengths[index]) for members in bins[rank::num_ranks]]


def balanced_bins(lengths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Indices into `lengths`, in bins of at most `max_tokens`; their number is a multiple of `num_ranks`.

    Longest first into the emptiest bin, with as few bins as that allows. Bins come fullest first, so that dealing
    them out in turn gives ranks like loads, in every round: their collectives meet in each micro-batch, where the
    fullest is waited for. Two bins differ by the shortest sequence of the fuller one at most. Waiting took 0 to 2 % of
    the time of 256 sequences of log-normal lengths (sigma 1 to 1.5, at most 8192) on 2 and 8 ranks, counted in tokens.

    >>> balanced_bins([4, 3, 3, 2], max_tokens=6, num_ranks=2)
    [[0, 3], [1, 2]]
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit a micro-batch of {max_tokens}; "
            "raise `learner.micro_batch_tokens`"
        )
    num_rounds = max(1, -(-sum(lengths) // (max_tokens * num_ranks)))
    while (bins := _filled(lengths, max_tokens=max_tokens, num_bins=num_rounds * num_ranks)) is None:
        num_rounds += 1
    return sorted(bins, key=lambda members: -sum(lengths[index] for index in members))


def _filled(lengths: Sequence[int], *, max_tokens: int, num_bins: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        emptiest = loads.index(min(loads))
        if loads[emptiest] + lengths[index] > max_tokens:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return bins


def _joined(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _kept_ids(sequences: Sequence[TokenSequence]) -> Tensor | None:
    """Of all loss tokens, as wide as the largest set. Raises ValueError where some sequences have none."""
    kept = [sequence.kept for sequence in sequences if sequence.kept is not None]
    if not kept:
        return None
    if len(kept) != len(sequences):
        raise ValueError(
            f"{len(kept)} of {len(sequences)} sequences in a pack have kept sets: they were not sampled alike, by "
            "`sampling.top_k` and `sampling.top_p`, and cannot be trained together"
        )
    sets = joined(kept)
    counts = sets.count_array()
    ids = np.full((len(counts), counts.max()), -1, dtype=np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = sets.id_array()
    return torch.from_numpy(ids)


_NOTHING = TokenSequence(
    tokens=np.zeros(1, dtype=np.int32),
    loss_mask=np.zeros(1, dtype=np.bool_),
    behaviour_logprobs=np.zeros(1, dtype=np.float32),
    advantages=np.zeros(1, dtype=np.float32),
    old_values=np.zeros(1, dtype=np.float32),
    returns=np.zeros(1, dtype=np.float32),
    kept=None,
)
