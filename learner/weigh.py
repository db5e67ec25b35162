"""What each token of a batch learns: groups in, token sequences with advantages out, as `objective.advantage` says."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from common.objective_config import ObjectiveConfig
from common.trajectory import Trajectory
from learner import allocation
from learner.advantage import (
    batch_standardised_advantages,
    centred_advantages,
    leave_one_out_advantages,
    returns_to_go,
    standardised_advantages,
)
from learner.pack import TokenSequence, sequences_of
from replay.ticket import Group

GROUP_RELATIVE = {
    "group_standardised": standardised_advantages,
    "group_centred": centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}


def weighed_sequences(groups: Sequence[Group], *, objective: ObjectiveConfig) -> list[TokenSequence]:
    """Every sequence of a batch, its tokens weighed by how much better they were than what they are compared with."""
    if objective.advantage in GROUP_RELATIVE:
        return _weighed_by_group(groups, objective)
    return _weighed_by_batch(groups, objective)


def token_rewards(trajectory: Trajectory, *, objective: ObjectiveConfig) -> Float[np.ndarray, " tokens"]:
    """The reward of each sampled token, in order, as `objective.allocation` says."""
    turn_rewards = np.array([sum(turn.rewards.values()) for turn in trajectory.turns], dtype=np.float64)
    turn_tokens = np.array([turn.stop - turn.start for turn in trajectory.turns])
    match objective.allocation:
        case "last_token":
            return allocation.last_token(turn_rewards, turn_tokens)
        case "uniform_positive":
            return allocation.uniform_positive(turn_rewards, turn_tokens)
        case "discounted":
            return allocation.discounted(turn_rewards, turn_tokens, discount=objective.allocation_discount)
        case "per_turn":
            return allocation.per_turn(turn_rewards, turn_tokens)
        case unknown:
            raise ValueError(f"no allocation {unknown!r}")


def _weighed_by_group(groups: Sequence[Group], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a trajectory, compared with its siblings."""
    advantages_of = GROUP_RELATIVE[objective.advantage]
    sequences: list[TokenSequence] = []
    for group in groups:
        advantages = advantages_of([trajectory.total_reward for trajectory in group.trajectories])
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            sequences += sequences_of(trajectory, advantage=float(advantage))
    return sequences


def _weighed_by_batch(groups: Sequence[Group], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a token, compared with every loss token of the batch."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    returns = [
        returns_to_go(token_rewards(trajectory, objective=objective), gamma=objective.gamma)
        for trajectory in trajectories
    ]
    advantages = batch_standardised_advantages(np.concatenate(returns))
    stops = np.cumsum([len(each) for each in returns])[:-1]
    sequences: list[TokenSequence] = []
    for trajectory, of_sampled in zip(trajectories, np.split(advantages, stops), strict=True):
        sequences += sequences_of(trajectory, advantage=_over_all_tokens(trajectory, of_sampled))
    return sequences


def _over_all_tokens(trajectory: Trajectory, of_sampled: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Each sampled token's number at its place, 0 elsewhere."""
    advantages = np.zeros(trajectory.num_tokens, dtype=np.float32)
    advantages[trajectory.loss_mask_array()] = of_sampled
    return advantages
