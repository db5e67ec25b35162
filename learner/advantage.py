"""How much better an attempt was than its siblings or than the batch: host arithmetic in float64, without gradient.

What compares siblings gives one number a trajectory, which `learner.weigh` gives to every token of it; what compares
tokens or turns gives one number each.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

# Below this, a difference between returns is the rounding of sums of rewards, not a fact about the attempts.
RETURN_RESOLUTION = 1e-6


def centred_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return above the mean of its group, in the unit of the reward; the order is that of `returns`.

    Dr. GRPO, https://arxiv.org/abs/2503.20783: dividing by the standard deviation would give groups that are almost
    always won or lost more weight than those in between.

        advantage[i] = returns[i] - mean(returns)

    >>> centred_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]

    Raises ValueError for fewer than two members, and for a return that is not finite.
    """
    group = _group(returns)
    advantages: npt.NDArray[np.float64] = group - group.mean()
    return advantages


def standardised_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return above the mean of its group, in standard deviations of the group; without unit.

    GRPO, https://arxiv.org/abs/2402.03300, with the sample standard deviation (n - 1), as TRL and verl have it.

        advantage[i] = (returns[i] - mean(returns)) / (std(returns) + 1e-6)

    The constant makes a group of equal returns come out as zeros when their sums differ by rounding.

    >>> standardised_advantages([1.0, 0.0, 0.0, 1.0]).round(3).tolist()
    [0.866, -0.866, -0.866, 0.866]

    Raises ValueError for fewer than two members, and for a return that is not finite.
    """
    group = _group(returns)
    advantages: npt.NDArray[np.float64] = (group - group.mean()) / (group.std(ddof=1) + RETURN_RESOLUTION)
    return advantages


def leave_one_out_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return above the mean of the others, in the unit of the reward.

    RLOO, https://arxiv.org/abs/2402.14740: a baseline without the member's own return leaves the gradient unbiased.

        advantage[i] = returns[i] - mean(returns without i) = n / (n - 1) * (returns[i] - mean(returns))

    >>> leave_one_out_advantages([3.0, 0.0, 0.0, 1.0]).round(3).tolist()
    [2.667, -1.333, -1.333, 0.0]

    Raises ValueError for fewer than two members, and for a return that is not finite.
    """
    group = _group(returns)
    others_mean = (group.sum() - group) / (group.size - 1)
    advantages: npt.NDArray[np.float64] = group - others_mean
    return advantages


def batch_standardised_advantages(numbers: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " tokens"]:
    """Each token's number above the mean of all tokens of the batch, in standard deviations; without unit.

    REINFORCE++, https://arxiv.org/abs/2501.03262, of returns-to-go: the batch is the baseline, so that attempts are
    compared over tasks. PPO's implementations, https://arxiv.org/abs/2005.12729, of what GAE gives.

        advantage[t] = (X[t] - mean(X)) / (std(X) + 1e-6)    over every loss token of the batch

    >>> batch_standardised_advantages(np.array([3.0, 3.0, 0.0, 0.0])).round(3).tolist()
    [1.0, 1.0, -1.0, -1.0]
    """
    advantages: npt.NDArray[np.float64] = (numbers - numbers.mean()) / (numbers.std() + RETURN_RESOLUTION)
    return advantages


def returns_to_go(rewards: Float[np.ndarray, " steps"], *, gamma: float) -> Float[np.ndarray, " steps"]:
    """What is still to come at each step, that step's own reward included.

        G[t] = rewards[t] + gamma * G[t + 1]

    >>> returns_to_go(np.array([1.0, 0.0, 2.0]), gamma=0.5).tolist()
    [1.5, 1.0, 2.0]
    """
    returns, following = np.zeros(len(rewards)), 0.0
    for step in reversed(range(len(rewards))):
        following = rewards[step] + gamma * following
        returns[step] = following
    return returns


def step_group_advantages(
    state_keys: Sequence[Hashable], returns: Float[np.ndarray, " turns"], *, divide_by_std: bool
) -> Float[np.ndarray, " turns"]:
    """GiGPO's step advantages, https://arxiv.org/abs/2505.10978: each turn among those that began in the same state.

    `state_keys` and `returns` (discounted, to go) are of all turns of all members of one group.

        advantage[k] = (returns[k] - mean(G)) / F,   G = returns of turns with state_keys[k],   F = std(G) + 1e-6 or 1

    A state that was met once has nothing to be compared with: 0. GiGPO adds these, times a weight, to the
    group-relative advantage of the whole trajectory.

    >>> step_group_advantages(["a", "b", "a", "c"], np.array([1.0, 5.0, 0.0, 2.0]), divide_by_std=False).tolist()
    [0.5, 0.0, -0.5, 0.0]
    """
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(state_keys):
        places.setdefault(key, []).append(place)
    advantages = np.zeros(len(returns))
    for members in places.values():
        if len(members) > 1:
            group = returns[members]
            scale = group.std(ddof=1) + RETURN_RESOLUTION if divide_by_std else 1.0
            advantages[members] = (group - group.mean()) / scale
    return advantages


def returns_differ(returns: Sequence[float]) -> bool:
    """Whether a group can teach anything: with equal returns every advantage, and so the gradient, is zero."""
    return bool(np.ptp(_group(returns)) > RETURN_RESOLUTION)


def _group(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    group = np.asarray(returns, dtype=np.float64)
    if group.size < 2:
        raise ValueError(f"a group needs at least 2 returns to compare, got {group.size}; see `replay.group_size`")
    if not np.all(np.isfinite(group)):
        raise ValueError(f"the returns of a group must be finite, got {group.tolist()}; look at the rewards")
    return group
