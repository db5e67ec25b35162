"""GRPO and its relatives: an attempt is compared with its siblings, the other attempts at the same task.

All arithmetic is float64 on the host. Functions that compare returns give one number for each attempt, in their order;
they raise ValueError for fewer than two members, and for a return that is not finite.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import imported
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.token_rewards import Numbers, returns_to_go, rewards_of_turns, tokens_of_turns

# A smaller difference between returns is a rounding error of summed rewards.
RETURN_RESOLUTION = 1e-6


def centred_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return minus the mean of its group, in the unit of the reward.

    Dr. GRPO, https://arxiv.org/abs/2503.20783: dividing by the standard deviation would give groups with almost only
    successes or failures more weight than those in between.

        advantage[i] = returns[i] - mean(returns)

    >>> centred_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    group = _group(returns)
    advantages: npt.NDArray[np.float64] = group - group.mean()
    return advantages


def standardised_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return minus the mean of its group, in standard deviations of the group; no unit.

    GRPO, https://arxiv.org/abs/2402.03300, with the sample standard deviation (n - 1), as in TRL and verl.

        advantage[i] = (returns[i] - mean(returns)) / (std(returns) + 1e-6)

    Because of the constant, a group of equal returns gives zeros even if their sums differ by rounding.

    >>> standardised_advantages([1.0, 0.0, 0.0, 1.0]).round(3).tolist()
    [0.866, -0.866, -0.866, 0.866]
    """
    group = _group(returns)
    advantages: npt.NDArray[np.float64] = (group - group.mean()) / (group.std(ddof=1) + RETURN_RESOLUTION)
    return advantages


def leave_one_out_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return minus the mean of the others, in the unit of the reward.

    RLOO, https://arxiv.org/abs/2402.14740: a baseline without the member's own return leaves the gradient unbiased.

        advantage[i] = returns[i] - mean(returns without i) = n / (n - 1) * (returns[i] - mean(returns))

    >>> leave_one_out_advantages([3.0, 0.0, 0.0, 1.0]).round(3).tolist()
    [2.667, -1.333, -1.333, 0.0]
    """
    group = _group(returns)
    advantages: npt.NDArray[np.float64] = group - (group.sum() - group) / (group.size - 1)
    return advantages


COMPARED = {
    "group_standardised": standardised_advantages,
    "group_centred": centred_advantages,
    "leave_one_out": leave_one_out_advantages,
}
# How the KL penalties of siblings are compared. Never in standard deviations: if all siblings had the same return, the
# penalties alone would make up the deviation, and their coefficient would cancel.
PENALTY_COMPARED = COMPARED | {"group_standardised": centred_advantages}


def grpo(members: Sequence[MeasuredTrajectory], objective: ObjectiveConfig) -> list[Numbers]:
    """One advantage for each attempt of a group: its return and its penalties, each compared with its siblings'.

        advantage = COMPARED(returns) - PENALTY_COMPARED(kl_coefficient * summed k1)

    With the allocation `per_turn` the first term is one number for each turn: see `advantages_of_turns`. A function of
    the user's gets the returns alone; then penalties are centred.

    With group_standardised this is GRPO's balance: as in its loss, the divergence is weighed against one standard
    deviation of the returns. Returns (1, 0) and penalties (0.2, 0) give 0.707 - 0.1 and -0.707 + 0.1.
    """
    compared = COMPARED.get(objective.advantage, partial(own_advantages, objective.advantage))
    penalties_compared = PENALTY_COMPARED.get(objective.advantage, centred_advantages)
    trajectories = [member.trajectory for member in members]
    losses = penalties_compared([float(member.penalties.sum()) for member in members])
    if objective.allocation == "per_turn":
        gains = advantages_of_turns(trajectories, compared)
    else:
        totals = compared([trajectory.total_reward for trajectory in trajectories])
        gains = [np.full(len(each.turns), total) for each, total in zip(trajectories, totals, strict=True)]
    return [
        np.repeat(gain - loss, tokens_of_turns(trajectory))
        for trajectory, gain, loss in zip(trajectories, gains, losses, strict=True)
    ]


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


def teaches(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> bool:
    """Whether the attempts of a group differ in what is compared; if not, every advantage is 0."""
    if objective.allocation == "per_turn" and objective.advantage in COMPARED:
        return any(map(is_any, advantages_of_turns(trajectories, centred_advantages)))
    returns = [trajectory.total_reward for trajectory in trajectories]
    if "advantage" in objective.own_parts:
        return is_any(own_advantages(objective.advantage, returns))
    return returns_differ(returns)


def is_any(advantages: npt.NDArray[np.float64]) -> bool:
    """Whether one of them is no rounding error."""
    return bool((abs(advantages) > RETURN_RESOLUTION).any())


def own_advantages(name: str, returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """The advantages by the user's function `name`. Raises ConfigError unless it gives one finite number a return."""
    found = imported("objective.advantage", name, Callable)(returns)
    try:
        advantages = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        advantages = np.array(np.nan)
    if advantages.shape != (len(returns),) or not np.all(np.isfinite(advantages)):
        raise ConfigError(
            f"`objective.advantage` {name!r} must give one finite number for each return, gave {found!r} for "
            f"{list(returns)}; groups of equal returns also occur"
        )
    return advantages


def returns_differ(returns: Sequence[float]) -> bool:
    """Whether the returns of a group differ: if not, all advantages, and so the gradient, are zero."""
    return bool(np.ptp(_group(returns)) > RETURN_RESOLUTION)


def _group(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """The returns less the first one: then equal returns have a mean of exactly 0, however large they are."""
    group = np.asarray(returns, dtype=np.float64)
    if group.size < 2:
        raise ValueError(f"a group must have at least 2 returns, got {group.size}; see `replay.group_size`")
    if not np.all(np.isfinite(group)):
        raise ValueError(f"the returns of a group must be finite, got {group.tolist()}; check the rewards")
    from_first: npt.NDArray[np.float64] = group - group[0]
    return from_first
