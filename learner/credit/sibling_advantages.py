"""Advantages of attempts that are compared with their siblings: by trajectory or by turn.

`slipstream.learner.credit.tree` compares siblings that fork from each other.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import TokenSequence, sequences_of
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, penalties_of_turns
from slipstream.learner.credit.token_rewards import over_all_tokens, rewards_of_turns, tokens_of_turns
from slipstream.learner.objective.advantage import (
    centred_advantages,
    gigpo_advantages,
    leave_one_out_advantages,
    own_advantages,
    returns_to_go,
    standardised_advantages,
)

GROUP_RELATIVE = {
    "group_standardised": standardised_advantages,
    "group_centred": centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}
TURN_RELATIVE = {"gigpo": standardised_advantages, "gigpo_centred": centred_advantages}
# How the KL penalties of siblings are compared. Never in standard deviations: if all siblings had the same return, the
# penalties alone would make up the deviation, and their coefficient would cancel.
PENALTY_RELATIVE = GROUP_RELATIVE | {"group_standardised": centred_advantages}


def advantages_by_group(
    groups: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per trajectory: its return and its penalties, each compared with those of its siblings.

        advantage = GROUP_RELATIVE(returns) - PENALTY_RELATIVE(kl_coefficient * summed k1)

    With the allocation `per_turn` the first term is one number for each turn: see `advantages_of_turns`. A function of
    the user's gets the returns alone; then penalties are centred.

    With group_standardised this is GRPO's balance: as in its loss, the divergence is weighed against one standard
    deviation of the returns. Returns (1, 0) and penalties (0.2, 0) give 0.707 - 0.1 and -0.707 + 0.1.
    """
    advantages_of = GROUP_RELATIVE.get(objective.advantage, partial(own_advantages, objective.advantage))
    penalties_of = PENALTY_RELATIVE.get(objective.advantage, centred_advantages)
    sequences: list[list[TokenSequence]] = []
    for members in groups:
        trajectories = [member.trajectory for member in members]
        losses = penalties_of([float(member.penalties.sum()) for member in members])
        if objective.allocation == "per_turn":
            of_turns = advantages_of_turns(trajectories, advantages_of)
            for trajectory, gain, loss in zip(trajectories, of_turns, losses, strict=True):
                of_sampled = np.repeat(gain - loss, tokens_of_turns(trajectory))
                sequences.append(sequences_of(trajectory, advantage=over_all_tokens(trajectory, of_sampled)))
            continue
        advantages = advantages_of([trajectory.total_reward for trajectory in trajectories]) - losses
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            sequences.append(sequences_of(trajectory, advantage=float(advantage)))
    return sequences


def advantages_of_turns(
    trajectories: Sequence[Trajectory], compared: Callable[[Sequence[float]], npt.NDArray[np.float64]]
) -> list[Float[np.ndarray, " _turns"]]:
    """The advantage of each turn of a group: its return-to-go, compared with those of its siblings at the same turn.

        advantage[i, k] = compared(returns-to-go of all members at turn k)[i]

    A sibling that has ended has nothing to come: 0. At the first turn this is the advantage of the trajectory.
    """
    to_go = [returns_to_go(rewards_of_turns(trajectory), gamma=1.0) for trajectory in trajectories]
    last = max(len(each) for each in to_go)
    table = np.array([np.pad(each, (0, last - len(each))) for each in to_go])
    advantages = np.array([compared(column.tolist()) for column in table.T]).T
    return [of_member[: len(each)] for of_member, each in zip(advantages, to_go, strict=True)]


def advantages_by_turn(
    groups: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per turn, compared with the siblings and with the turns that began in the same state.

    Penalties are compared in the same way, but never in standard deviations: see `advantages_by_group`.
    """
    compared = TURN_RELATIVE[objective.advantage]
    sequences: list[list[TokenSequence]] = []
    for members in groups:
        trajectories = [member.trajectory for member in members]
        rewards = [rewards_of_turns(trajectory) for trajectory in trajectories]
        gains = same_state_advantages(trajectories, rewards, objective, compared=compared)
        penalties = [penalties_of_turns(member) for member in members]
        losses = same_state_advantages(trajectories, penalties, objective, compared=centred_advantages)
        for member, gain, loss in zip(members, gains, losses, strict=True):
            of_sampled = np.repeat(gain - loss, tokens_of_turns(member.trajectory))
            sequences.append(sequences_of(member.trajectory, advantage=over_all_tokens(member.trajectory, of_sampled)))
    return sequences


def same_state_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[npt.NDArray[np.float64]],
    objective: ObjectiveConfig,
    *,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> list[Float[np.ndarray, " _turns"]]:
    """The advantage of each turn of a group, by GiGPO; `rewards` are one number for each turn."""
    return gigpo_advantages(
        rewards,
        [[turn.state_key for turn in trajectory.turns] for trajectory in trajectories],
        gamma=objective.gamma,
        same_state_weight=objective.same_state_weight,
        compared=compared,
    )
