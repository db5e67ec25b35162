"""A trajectory with what was measured of it, and its rewards less its KL penalties."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.credit.measure import Measured, Numbers
from slipstream.learner.credit.token_rewards import rewards_of_turns, token_rewards, tokens_of_turns
from slipstream.learner.objective.kl import k1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTrajectory:
    """A trajectory, with numbers for each of its sampled tokens in order; 0 if the objective does not need them."""

    trajectory: Trajectory
    penalties: Numbers  # KL penalty, subtracted from the token's reward
    values: Numbers  # of the critic
    lagged_ratios: Numbers  # current / behaviour


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
        divergence = k1(torch.from_numpy(measured.reference_logprobs), q_logprobs=torch.from_numpy(sampled))
        penalties = objective.kl_coefficient * divergence.numpy()
    if measured.values is not None:
        values = measured.values
    if measured.current_logprobs is not None:
        ratios = np.exp(measured.current_logprobs - sampled)
    parts = [np.split(numbers, stops[:-1]) for numbers in (penalties, values, ratios)]
    return [
        MeasuredTrajectory(trajectory=trajectory, penalties=penalties, values=values, lagged_ratios=ratios)
        for trajectory, penalties, values, ratios in zip(trajectories, *parts, strict=True)
    ]


def penalised_rewards(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> Numbers:
    """The reward of each sampled token, less its KL penalty."""
    rewards: Numbers = token_rewards(episode.trajectory, objective=objective) - episode.penalties
    return rewards


def penalised_turn_rewards(episode: MeasuredTrajectory) -> Numbers:
    """The reward of each turn, less the KL penalties of its tokens."""
    rewards: Numbers = rewards_of_turns(episode.trajectory) - penalties_of_turns(episode)
    return rewards


def penalties_of_turns(episode: MeasuredTrajectory) -> Numbers:
    """The KL penalty of each turn: the sum over its tokens."""
    turn_tokens = tokens_of_turns(episode.trajectory)
    penalties: Numbers = np.add.reduceat(episode.penalties, np.cumsum(turn_tokens) - turn_tokens)
    return penalties
