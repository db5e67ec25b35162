"""The reward of each sampled token of a trajectory, by `objective.allocation`, and numbers by turn and by token."""

import math

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.objective.allocation import last_token, per_turn


def token_rewards(trajectory: Trajectory, *, objective: ObjectiveConfig) -> Float[np.ndarray, " tokens"]:
    """The reward of each sampled token, in order, by `objective.allocation`."""
    allocate = per_turn if objective.allocation == "per_turn" else last_token
    return allocate(rewards_of_turns(trajectory), tokens_of_turns(trajectory))


def rewards_of_turns(trajectory: Trajectory) -> Float[np.ndarray, " turns"]:
    """The reward of each turn: the sum of its named parts."""
    return np.array([math.fsum(turn.rewards.values()) for turn in trajectory.turns])


def tokens_of_turns(trajectory: Trajectory) -> Int[np.ndarray, " turns"]:
    """How many tokens each turn sampled."""
    return np.array([turn.stop - turn.start for turn in trajectory.turns])


def over_all_tokens(trajectory: Trajectory, of_sampled: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Each sampled token's number at its place, 0 elsewhere."""
    numbers = np.zeros(trajectory.num_tokens, dtype=np.float32)
    numbers[trajectory.loss_mask_array()] = of_sampled
    return numbers
