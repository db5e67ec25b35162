"""A trajectory with what was measured of its sampled tokens, and its rewards less its KL penalties."""

from dataclasses import dataclass

import numpy as np

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.credit.token_rewards import Numbers, last_token, per_turn, rewards_of_turns, tokens_of_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTrajectory:
    """A trajectory, with numbers for each of its sampled tokens in order; 0 if the objective does not need them."""

    trajectory: Trajectory
    penalties: Numbers  # KL penalty, subtracted from the token's reward
    values: Numbers  # of the critic
    lagged_ratios: Numbers  # current / behaviour


def penalised_rewards(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> Numbers:
    """The reward of each sampled token, by `objective.allocation`, less its KL penalty."""
    allocate = per_turn if objective.allocation == "per_turn" else last_token
    whole = allocate(rewards_of_turns(episode.trajectory), tokens_of_turns(episode.trajectory))
    rewards: Numbers = whole - episode.penalties
    return rewards


def penalties_of_turns(episode: MeasuredTrajectory) -> Numbers:
    """The KL penalty of each turn: the sum over its tokens."""
    turn_tokens = tokens_of_turns(episode.trajectory)
    penalties: Numbers = np.add.reduceat(episode.penalties, np.cumsum(turn_tokens) - turn_tokens)
    return penalties
