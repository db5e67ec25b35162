"""How much better an attempt was than its siblings: one number a trajectory, broadcast to its tokens when packed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
