"""Measures what the advantages need: forward passes of the models over the whole batch, without gradient.

Each rank measures its own packs, and the results are exchanged. So every rank has the same number for every token, and
everything computed from them, such as a mean over the batch, is identical on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import Packed, TokenSequence, bins_of_rank
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.token_rewards import Numbers
from slipstream.learner.model.critic import ValueHead
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step import StepModels


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One number for each loss token of a batch, sequence after sequence; None if the objective does not need it."""

    values: Numbers | None = None  # the critic's, in the unit of the reward
    reference_logprobs: Numbers | None = None
    current_logprobs: Numbers | None = None


def measure(
    sequences: Sequence[TokenSequence],
    *,
    models: StepModels,
    ranks: Ranks,
    objective: ObjectiveConfig,
    micro_batch_tokens: int,
) -> Measured:
    """Measure what `objective` needs of `sequences`; every rank passes all of them, in the same order.

    Every rank calls it: each forward pass is collective, and so is the exchange at the end.
    """
    model, critic, reference = models.policy, models.critic, models.reference
    queries: dict[str, Callable[[Packed], Tensor]] = {}
    if critic is not None and isinstance(critic.module, ValueHead):
        queries["values"] = lambda packed: model(packed).values
    elif critic is not None:
        queries["values"] = critic.module
    if reference is not None and objective.kl_place == "reward":
        queries["reference_logprobs"] = lambda packed: reference(packed).logprobs
    if objective.advantage == "vtrace":
        queries["current_logprobs"] = lambda packed: model(packed).logprobs
    if not queries:
        return Measured()
    found = of_each_token(
        queries, sequences, micro_batch_tokens=micro_batch_tokens, ranks=ranks, share_prefixes=models.share_prefixes
    )
    if critic is not None:
        found["values"] = critic.scale.restored(found["values"])
    return Measured(**found)


@torch.no_grad()
def of_each_token(
    queries: Mapping[str, Callable[[Packed], Tensor]],
    sequences: Sequence[TokenSequence],
    *,
    micro_batch_tokens: int,
    ranks: Ranks,
    share_prefixes: bool,
) -> dict[str, Numbers]:
    """The result of each query for each loss token, on every rank. `share_prefixes` says whether their models can.

    Each token is in one pack, of ranks of which one counts, so the sum over ranks is exact.
    """
    stops = np.cumsum([sequence.loss_mask.sum() for sequence in sequences])
    starts = np.concatenate([[0], stops[:-1]])
    results = torch.zeros((len(queries), int(stops[-1])), dtype=torch.float64, device=ranks.device)
    for each in bins_of_rank(
        sequences,
        max_tokens=micro_batch_tokens,
        num_ranks=ranks.num_packing,
        rank=ranks.packing_rank,
        share_prefixes=share_prefixes,
    ):
        packed = each.pack(sequences, context=ranks.context).to(ranks.device)
        places = [np.arange(starts[index], stops[index]) for index in each.members]
        where = torch.from_numpy(np.concatenate([np.arange(0), *places])).to(ranks.device)
        for result, query in zip(results, queries.values(), strict=True):
            result[where] = query(packed).double()
    ranks.add_up(results)
    return dict(zip(queries, results.cpu().numpy(), strict=True))


def measured_trajectories(
    trajectories: Sequence[Trajectory], *, objective: ObjectiveConfig, measured: Measured
) -> list[MeasuredTrajectory]:
    """Split what was measured of a whole batch by trajectory."""
    behaviour = [trajectory.behaviour_logprob_array()[trajectory.loss_mask_array()] for trajectory in trajectories]
    stops = np.cumsum([len(each) for each in behaviour])
    zeros = np.zeros(int(stops[-1]))
    sampled = np.concatenate(behaviour).astype(np.float64)
    penalties = values = ratios = zeros
    if measured.reference_logprobs is not None:
        # Schulman's k1, http://joschu.net/blog/kl-approx.html: an estimate of KL(behaviour || reference) in nats
        penalties = objective.kl_coefficient * (sampled - measured.reference_logprobs)
    if measured.values is not None:
        values = measured.values
    if measured.current_logprobs is not None:
        ratios = np.exp(measured.current_logprobs - sampled)
    parts = [np.split(numbers, stops[:-1]) for numbers in (penalties, values, ratios)]
    return [
        MeasuredTrajectory(trajectory=trajectory, penalties=penalties, values=values, lagged_ratios=ratios)
        for trajectory, penalties, values, ratios in zip(trajectories, *parts, strict=True)
    ]
