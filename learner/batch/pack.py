"""Token sequences concatenated without padding: the only layout of a batch.

`tokens` of all sequences follow one another; `lengths` says where each ends, and `position_ids` start again at 0 in
each. Element i of every per-token array belongs to `tokens[i]`. The longest sequence comes first. If shared prefixes
are computed once, sequences that begin alike are neighbours instead, and `prefixes` has the tokens that are computed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.common.records.kept_sets import KeptSets, joined, no_sets
from slipstream.common.records.trajectory import LogprobArray, MaskArray, TokenArray, Trajectory
from slipstream.common.records.version_lag import VersionArray
from slipstream.learner.batch.prefixes import (
    Prefixes,
    cost_of,
    costs_of,
    lexicographic,
    prefixes_of,
    runs_of,
    shared_lengths,
)
from slipstream.learner.objective.ratio import Sequences
from slipstream.learner.ranks.context import Context, LossStates, Share, on_device

# Prefixes are shared if that saves at least this fraction of a batch's computed tokens: see docs/benchmarks.md.
MIN_SAVED = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """A sequence that a forward pass reads as one text, with what the loss needs to know about each token."""

    tokens: TokenArray
    loss_mask: MaskArray  # True on sampled tokens that are trained; never on the first token
    behaviour_logprobs: LogprobArray  # of the policy that sampled; 0 elsewhere
    advantages: LogprobArray
    old_values: LogprobArray | None = None  # of the critic at the start of the step; None without a critic
    returns: LogprobArray | None = None  # the critic's targets
    trajectory: int = 0  # number in the batch of the trajectory that it is a branch of: see `numbered`
    trajectory_tokens: int = 0  # loss tokens of that whole trajectory: see `numbered`
    policy_versions: VersionArray | None = None  # that sampled each token; 0 elsewhere; None if no episode was played
    lags: VersionArray | None = None  # optimizer steps since that version; 0 elsewhere; None if not counted
    kept: KeptSets | None  # of the loss tokens; None if the policy sampled from the whole vocabulary
    temperature: float | None = None  # that the tokens were sampled at; None: that of the model's settings

    @classmethod
    def bare(
        cls, tokens: Sequence[int] | npt.NDArray[np.integer[Any]], loss_mask: Sequence[bool] | MaskArray
    ) -> "TokenSequence":
        """A sequence without log-probabilities and advantages, for a model that only reads it."""
        read = np.asarray(tokens, dtype=np.int32)
        nothing = np.zeros(len(read), dtype=np.float32)
        marked = np.asarray(loss_mask, dtype=np.bool_)
        return cls(tokens=read, loss_mask=marked, behaviour_logprobs=nothing, advantages=nothing, kept=None)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Concatenated sequences: one micro-batch."""

    tokens: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]  # 0, 1, 2, ... from the start of each sequence
    loss_mask: Bool[Tensor, " tokens"]
    # What the mask and the lengths say, as tensors made on the host: to find them on a GPU, the host would wait for it.
    loss_positions: Int[Tensor, " loss_tokens"]  # of the loss tokens in the pack
    loss_sequence_ids: Int[Tensor, " loss_tokens"]  # the sequence of each loss token, in [0, sequences)
    bounds: Int[Tensor, " bounds"]  # where each sequence begins, and where the last one ends
    behaviour_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    old_values: Float[Tensor, " tokens"] | None = None
    returns: Float[Tensor, " tokens"] | None = None
    lags: Int[Tensor, " tokens"] | None = None
    # The ids that each loss token was sampled from, padded with -1; None if that was the whole vocabulary.
    kept: Int[Tensor, "loss_tokens width"] | None
    has_kept: Bool[Tensor, " loss_tokens"] | None = None  # whether a loss token has such ids; None: all have, or none
    # That the loss tokens were sampled at: one for all, or one for each. None: that of the model's settings.
    temperature: Float[Tensor, " loss_tokens"] | float | None = None
    lengths: tuple[int, ...]  # tokens of each sequence; on the host, so that no kernel waits for them
    trajectories: Int[Tensor, " sequences"]  # of each sequence, by its number in the batch
    trajectory_tokens: Int[Tensor, " sequences"]  # loss tokens of that whole trajectory
    prefixes: Prefixes | None = None  # None if every token is computed
    share: Share | None = None  # of this rank, if several compute the pack together

    def to(self, device: torch.device) -> "Packed":
        """The same on `device`. The host does not wait for the copies to a GPU: they are from pinned memory."""
        parts = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            name: on_device(part, device) for name, part in parts.items() if isinstance(part, Tensor)
        }
        share = self.share and dataclasses.replace(self.share, tokens=on_device(self.share.tokens, device))
        return dataclasses.replace(self, **moved, prefixes=self.prefixes and self.prefixes.to(device), share=share)

    @property
    def computed(self) -> Int[Tensor, " computed"] | None:
        """The positions of the tokens that this rank computes; None: all."""
        if self.share:
            return self.share.tokens
        return self.prefixes.computed if self.prefixes else None

    @property
    def computed_lengths(self) -> tuple[int, ...]:
        """The tokens of each sequence that pass through the model."""
        return self.prefixes.lengths if self.prefixes else self.lengths

    @property
    def num_pairs(self) -> int:
        """How many pairs there are of a computed token and a token that it attends to: itself and those before it."""
        return sum(
            (length * (length + 1) - (length - own) * (length - own + 1)) // 2
            for length, own in zip(self.lengths, self.computed_lengths, strict=True)
        )

    def among_computed(self, positions: Int[Tensor, " positions"]) -> Int[Tensor, " positions"]:
        """Where the states of the tokens at `positions` of the pack are among those that the model computes."""
        return self.prefixes.places[positions] if self.prefixes else positions

    def loss_states(self, *, before: int) -> LossStates:
        """Where the state is that something is predicted from for each loss token: `before` tokens before it."""
        if self.share:
            return self.share.loss_states(before=before)
        return LossStates(
            places=self.among_computed(self.loss_positions - before),
            own=None,
            num_loss_tokens=len(self.loss_positions),
            context=None,
        )

    @property
    def loss_sequences(self) -> Sequences:
        """Which sequence each loss token belongs to."""
        return Sequences(
            ids=self.loss_sequence_ids,
            num=len(self.lengths),
            trajectories=self.trajectories,
            trajectory_tokens=self.trajectory_tokens,
        )

    @property
    def loss_lags(self) -> Int[Tensor, " tokens"]:
        """The lag of each loss token; 0 if lags are not counted."""
        return torch.zeros_like(self.loss_positions) if self.lags is None else self.lags[self.loss_positions]


def sequences_of(
    trajectory: Trajectory,
    *,
    advantage: float | LogprobArray,
    old_values: LogprobArray | None = None,
    returns: LogprobArray | None = None,
    trained_from: int = 0,
) -> list[TokenSequence]:
    """One sequence for each branch of a trajectory.

    `advantage` is one number for all tokens or one for each; `old_values` and `returns` have one for each token. Tokens
    before `trained_from` are not trained, and a branch of only such tokens is left out: a sibling has them too.

    Raises ValueError if a branch begins with a sampled token: there is no prompt that it was sampled from.
    """
    tokens, loss_mask = trajectory.token_array(), trajectory.loss_mask_array()
    policy_versions = trajectory.policy_version_array()
    behaviour_logprobs = trajectory.behaviour_logprob_array()
    advantages = np.broadcast_to(np.asarray(advantage, dtype=np.float32), tokens.shape)
    stops = [*trajectory.branch_starts[1:], trajectory.num_tokens]
    sequences, num_sampled = [], np.concatenate([[0], loss_mask.cumsum()])
    own_mask = loss_mask & (np.arange(len(tokens)) >= trained_from)
    for start, stop in zip(trajectory.branch_starts, stops, strict=True):
        if loss_mask[start]:
            raise ValueError(
                f"group {trajectory.group_id}, member {trajectory.member}: token {start} is the first of a sequence "
                "and has loss_mask True; a sampled token needs a prompt before it"
            )
        if stop <= trained_from:
            continue
        sequences.append(
            TokenSequence(
                tokens=tokens[start:stop],
                loss_mask=own_mask[start:stop],
                behaviour_logprobs=behaviour_logprobs[start:stop],
                advantages=advantages[start:stop],
                old_values=None if old_values is None else old_values[start:stop],
                returns=None if returns is None else returns[start:stop],
                policy_versions=policy_versions[start:stop],
                kept=trajectory.kept
                and trajectory.kept.between(int(num_sampled[max(start, trained_from)]), int(num_sampled[stop])),
                temperature=trajectory.sampling.temperature,
            )
        )
    return sequences


def with_lags(
    sequences: Sequence[TokenSequence], lags_of: Callable[[VersionArray], VersionArray]
) -> list[TokenSequence]:
    """Add the lag of every sampled token; `lags_of` is `Progress.lags` of the learner."""
    found = []
    for sequence in sequences:
        assert sequence.policy_versions is not None, "only episodes lag"
        lags = np.where(sequence.loss_mask, lags_of(sequence.policy_versions), 0).astype(np.int32)
        found.append(dataclasses.replace(sequence, lags=lags))
    return found


def count_loss_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(int(sequence.loss_mask.sum()) for sequence in sequences)


def returns_of(sequences: Sequence[TokenSequence]) -> npt.NDArray[np.float64]:
    """The `returns` at every loss token, sequence after sequence."""
    found = [sequence.returns[sequence.loss_mask] for sequence in sequences if sequence.returns is not None]
    return np.concatenate(found).astype(np.float64)


def numbered(trajectories: Iterable[Sequence[TokenSequence]]) -> list[TokenSequence]:
    """The sequences of a batch, each with the number of its trajectory; an element of `trajectories` has branches.

    Branches may go to different packs and ranks, but the loss is still counted by trajectory.
    """
    return [
        dataclasses.replace(branch, trajectory=number, trajectory_tokens=count_loss_tokens(branches))
        for number, branches in enumerate(trajectories)
        for branch in branches
    ]


def count_trajectories(sequences: Sequence[TokenSequence]) -> int:
    """The number of trajectories in a batch that `numbered` made."""
    return 1 + max((sequence.trajectory for sequence in sequences), default=-1)


def pack(sequences: Sequence[TokenSequence], *, share_prefixes: bool = False, context: Context | None = None) -> Packed:
    """Concatenate `sequences`, longest first, so that attention finds sequences of similar length next to each other.

    With `share_prefixes` they are in lexicographic order, and a prefix of several sequences is computed once. With
    `context` the pack has this rank's share of the computed tokens.

    Without sequences, the pack is one token without loss: a rank with no data must still take part in the step.
    """
    if not sequences:
        sequences = [_NOTHING]
    ordered = sorted(sequences, key=lambda sequence: -sequence.num_tokens)
    prefixes = None
    if share_prefixes:
        ordered = [sequences[index] for index in lexicographic([sequence.tokens for sequence in sequences])]
        shared = shared_lengths([sequence.tokens for sequence in ordered])
        if any(shared):
            prefixes = prefixes_of([sequence.num_tokens for sequence in ordered], shared)
    per_token = {
        item.name: torch.from_numpy(np.concatenate([getattr(sequence, item.name) for sequence in ordered]))
        for item in dataclasses.fields(TokenSequence)
        if item.name not in _NOT_PACKED and getattr(ordered[0], item.name) is not None
    }
    lengths = tuple(sequence.num_tokens for sequence in ordered)
    index = index_of(per_token["loss_mask"], lengths)
    return Packed(
        **per_token | {"tokens": per_token["tokens"].long()},
        **index,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        **_kept_ids(ordered),
        temperature=_temperature(ordered),
        lengths=lengths,
        trajectories=torch.tensor([sequence.trajectory for sequence in ordered]),
        trajectory_tokens=torch.tensor([sequence.trajectory_tokens for sequence in ordered]),
        prefixes=prefixes,
        share=_share(context, sum(lengths), prefixes, loss_positions=index["loss_positions"]) if context else None,
    )


def _share(context: Context, num_tokens: int, prefixes: Prefixes | None, *, loss_positions: Tensor) -> Share:
    every = np.arange(num_tokens)
    computed, places = (prefixes.computed.numpy(), prefixes.places.numpy()) if prefixes else (every, every)
    size = -(-len(computed) // context.num_ranks)
    mine = np.arange(context.rank * size, (context.rank + 1) * size)
    return Share(
        context=context,
        tokens=torch.from_numpy(computed[mine.clip(max=len(computed) - 1)]),
        places=places,
        loss_positions=loss_positions.numpy(),
    )


def index_of(loss_mask: Bool[Tensor, " tokens"], lengths: Sequence[int]) -> dict[str, Tensor]:
    """The fields of a pack that follow from its loss mask and the lengths of its sequences."""
    positions = loss_mask.nonzero().squeeze(1)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {
        "loss_positions": positions,
        "loss_sequence_ids": ids[positions],
        "bounds": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """The sequences of one pack."""

    members: Sequence[int]  # indices into the batch, in the order of the pack
    share_prefixes: bool

    def pack(self, batch: Sequence[TokenSequence], *, context: Context | None = None) -> Packed:
        """Its members of `batch`, concatenated."""
        return pack([batch[index] for index in self.members], share_prefixes=self.share_prefixes, context=context)


def micro_batches(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    num_ranks: int,
    rank: int,
    share_prefixes: bool = False,
    context: Context | None = None,
) -> list[Packed]:
    """This rank's packs of `sequences`: see `bins_of_rank`. Every rank passes all sequences, in the same order."""
    bins = bins_of_rank(sequences, max_tokens=max_tokens, num_ranks=num_ranks, rank=rank, share_prefixes=share_prefixes)
    return [each.pack(sequences, context=context) for each in bins]


def bins_of_rank(
    sequences: Sequence[TokenSequence], *, max_tokens: int, num_ranks: int, rank: int, share_prefixes: bool
) -> list[Bin]:
    """The sequences of each pack of this rank.

    Every rank gets the same number of packs, because forward passes are collective, and about the same number of
    tokens. With `share_prefixes`, prefixes are shared if that saves at least MIN_SAVED of the time in which all ranks
    wait for the fullest pack. Raises ValueError for a sequence longer than `max_tokens`.
    """
    lengths = [sequence.num_tokens for sequence in sequences]
    bins = balanced_bins(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    if share_prefixes and len(sequences) > 1:
        order = lexicographic([sequence.tokens for sequence in sequences])
        ordered = [lengths[index] for index in order]
        shared = shared_lengths([sequences[index].tokens for index in order])
        costs = costs_of(ordered, shared)
        runs = runs_of(ordered, shared, max_tokens=max_tokens, num_ranks=num_ranks)
        apart = sum(sum(lengths[index] for index in members) for members in bins[::num_ranks])
        if sum(cost_of(run, ordered, costs) for run in runs[::num_ranks]) <= (1 - MIN_SAVED) * apart:
            return [Bin(members=[order[place] for place in run], share_prefixes=True) for run in runs[rank::num_ranks]]
    return [
        Bin(members=sorted(members, key=lambda index: -lengths[index]), share_prefixes=False)
        for members in bins[rank::num_ranks]
    ]


def balanced_bins(lengths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Distribute indices into `lengths` over bins of at most `max_tokens`; their number is a multiple of `num_ranks`.

    The longest sequence goes first, always into the emptiest bin, with as few bins as that allows. Bins are returned
    fullest first and dealt out to ranks in turn. So the ranks have similar loads in each round, where all wait for the
    fullest bin. Two bins differ at most by the shortest sequence of the fuller one.

    >>> balanced_bins([4, 3, 3, 2], max_tokens=6, num_ranks=2)
    [[0, 3], [1, 2]]
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}; "
            "raise `learner.micro_batch_tokens`, with `learner.context_ranks` if that does not fit a rank's memory"
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


def _kept_ids(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """The kept ids of all loss tokens, padded to equal width, and which tokens have some."""
    sets = joined([each.kept or no_sets(int(each.loss_mask.sum())) for each in sequences])
    counts = sets.count_array()
    if not counts.any():
        return {"kept": None, "has_kept": None}
    ids = np.full((len(counts), counts.max()), -1, dtype=np.int32)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = sets.id_array()
    has_kept = None if counts.all() else torch.from_numpy(counts > 0)
    return {"kept": torch.from_numpy(ids), "has_kept": has_kept}


def _temperature(sequences: Sequence[TokenSequence]) -> Tensor | float | None:
    """The temperature of the loss tokens: one number if all share it. Raises ValueError if only some have one."""
    trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
    found = {sequence.temperature for sequence in trained}
    if len(found) < 2:
        return found.pop() if found else None
    if None in found:
        raise ValueError("only some sequences of a pack have a temperature; pack the others by themselves")
    counts = torch.tensor([int(sequence.loss_mask.sum()) for sequence in trained])
    return torch.tensor([sequence.temperature for sequence in trained]).repeat_interleave(counts)


_NOTHING = dataclasses.replace(
    TokenSequence.bare([0], [False]),
    old_values=np.zeros(1, dtype=np.float32),
    returns=np.zeros(1, dtype=np.float32),
    lags=np.zeros(1, dtype=np.int32),
)
# Fields that are not one number per token, or that a pack does not need.
_NOT_PACKED = ("kept", "policy_versions", "temperature", "trajectory", "trajectory_tokens")
