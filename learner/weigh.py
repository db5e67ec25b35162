"""What each token of a batch learns: groups in, token sequences with advantages out, as `objective.advantage` says."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from common.objective_config import ObjectiveConfig
from common.trajectory import Trajectory
from learner import allocation
from learner.advantage import (
    RETURN_RESOLUTION,
    batch_standardised_advantages,
    centred_advantages,
    gigpo_advantages,
    leave_one_out_advantages,
    returns_differ,
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
TURN_RELATIVE = {"gigpo": standardised_advantages, "gigpo_centred": centred_advantages}


def weighed_sequences(groups: Sequence[Group], *, objective: ObjectiveConfig) -> list[TokenSequence]:
    """Every sequence of a batch, its tokens weighed by how much better they were than what they are compared with."""
    if objective.advantage in GROUP_RELATIVE:
        return _weighed_by_group(groups, objective)
    if objective.advantage in TURN_RELATIVE:
        return _weighed_by_turn(groups, objective)
    return _weighed_by_batch(groups, objective)


def teaches(group: Group, *, objective: ObjectiveConfig) -> bool:
    """Whether anything in the group has an advantage; without, its gradient is zero."""
    if objective.advantage in TURN_RELATIVE:
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in _turn_advantages(group, objective))
    return returns_differ([trajectory.total_reward for trajectory in group.trajectories])


def token_rewards(trajectory: Trajectory, *, objective: ObjectiveConfig) -> Float[np.ndarray, " tokens"]:
    """The reward of each sampled token, in order, as `objective.allocation` says."""
    turn_rewards, turn_tokens = _turn_rewards(trajectory), _turn_tokens(trajectory)
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


def _weighed_by_turn(groups: Sequence[Group], objective: ObjectiveConfig) -> list[TokenSequence]:
    """One number a turn, compared with the siblings and with the turns that began in the same state."""
    sequences: list[TokenSequence] = []
    for group in groups:
        advantages = _turn_advantages(group, objective)
        for trajectory, of_turns in zip(group.trajectories, advantages, strict=True):
            of_sampled = np.repeat(of_turns, _turn_tokens(trajectory))
            sequences += sequences_of(trajectory, advantage=_over_all_tokens(trajectory, of_sampled))
    return sequences


def _turn_advantages(group: Group, objective: ObjectiveConfig) -> list[Float[np.ndarray, " _turns"]]:
    return gigpo_advantages(
        [_turn_rewards(trajectory) for trajectory in group.trajectories],
        [[turn.state_key for turn in trajectory.turns] for trajectory in group.trajectories],
        gamma=objective.gamma,
        same_state_weight=objective.same_state_weight,
        compared=TURN_RELATIVE[objective.advantage],
    )


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


def _turn_rewards(trajectory: Trajectory) -> Float[np.ndarray, " turns"]:
    return np.array([math.fsum(turn.rewards.values()) for turn in trajectory.turns])


def _turn_tokens(trajectory: Trajectory) -> Int[np.ndarray, " turns"]:
    return np.array([turn.stop - turn.start for turn in trajectory.turns])


def _over_all_tokens(trajectory: Trajectory, of_sampled: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Each sampled token's number at its place, 0 elsewhere."""
    advantages = np.zeros(trajectory.num_tokens, dtype=np.float32)
    advantages[trajectory.loss_mask_array()] = of_sampled
    return advantages
