"""Advantages: how much better an attempt was than its siblings or than the batch, in float64 on the host.

Functions that compare siblings return one number per trajectory; `slipstream.learner.credit.token_advantages` gives it
to every token. Functions that compare tokens or turns return one number for each.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import imported

# A smaller difference between returns is a rounding error of summed rewards.
RETURN_RESOLUTION = 1e-6


def centred_advantages(returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """Each member's return minus the mean of its group, in the unit of the reward, in the order of `returns`.

    Dr. GRPO, https://arxiv.org/abs/2503.20783: dividing by the standard deviation would give groups with almost only
    successes or failures more weight than those in between.

        advantage[i] = returns[i] - mean(returns)

    >>> centred_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]

    Raises ValueError for fewer than two members, and for a return that is not finite.
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

    Raises ValueError for fewer than two members, and for a return that is not finite.
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

    Raises ValueError for fewer than two members, and for a return that is not finite.
    """
    group = _group(returns)
    others_mean = (group.sum() - group) / (group.size - 1)
    advantages: npt.NDArray[np.float64] = group - others_mean
    return advantages


def batch_standardised_advantages(numbers: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " tokens"]:
    """Each token's number minus the mean over all tokens of the batch, in standard deviations; no unit.

    REINFORCE++, https://arxiv.org/abs/2501.03262, applies it to returns-to-go: the batch is the baseline, so attempts
    are compared across tasks. PPO implementations, https://arxiv.org/abs/2005.12729, apply it to GAE's advantages.

        advantage[t] = (X[t] - mean(X)) / (std(X) + 1e-6)    over every loss token of the batch

    >>> batch_standardised_advantages(np.array([3.0, 3.0, 0.0, 0.0])).round(3).tolist()
    [1.0, 1.0, -1.0, -1.0]
    """
    numbers = numbers - numbers[:1]  # as in `_group`
    advantages: npt.NDArray[np.float64] = (numbers - numbers.mean()) / (numbers.std() + RETURN_RESOLUTION)
    return advantages


def returns_to_go(rewards: Float[np.ndarray, " steps"], *, gamma: float) -> Float[np.ndarray, " steps"]:
    """The discounted sum of rewards from each step on, including the reward of that step.

        G[t] = rewards[t] + gamma * G[t + 1]

    >>> returns_to_go(np.array([1.0, 0.0, 2.0]), gamma=0.5).tolist()
    [1.5, 1.0, 2.0]
    """
    returns, following = np.zeros(len(rewards)), 0.0
    for step in reversed(range(len(rewards))):
        following = rewards[step] + gamma * following
        returns[step] = following
    return returns


def same_state_advantages(
    state_keys: Sequence[str],
    returns: Float[np.ndarray, " turns"],
    *,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> Float[np.ndarray, " turns"]:
    """Compares each turn with those that began in the same state: GiGPO's step relative advantage (eq. 7).

    `state_keys` and `returns` (discounted returns-to-go) are of all turns of all members of one group; `compared` is
    `standardised_advantages` or `centred_advantages`.

        advantage[k] = compared(returns of the turns with state_keys[k])[k]

    The advantage is 0 for a state that occurs once, and for an unknown state (""), which is never equal to another.

    >>> returns = np.array([1.0, 5.0, 0.0, 2.0])
    >>> same_state_advantages(["a", "b", "a", "c"], returns, compared=centred_advantages).tolist()
    [0.5, 0.0, -0.5, 0.0]
    """
    places: dict[str, list[int]] = {}
    for place, key in enumerate(state_keys):
        if key:
            places.setdefault(key, []).append(place)
    advantages = np.zeros(len(returns))
    for members in places.values():
        if len(members) > 1:
            advantages[members] = compared(returns[members].tolist())
    return advantages


def gigpo_advantages(
    turn_rewards: Sequence[Float[np.ndarray, " _turns"]],
    state_keys: Sequence[Sequence[str]],
    *,
    gamma: float,
    same_state_weight: float,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> list[Float[np.ndarray, " _turns"]]:
    """GiGPO, https://arxiv.org/abs/2505.10978: compares attempts with siblings, and turns with those in the same state.

    Both arguments are indexed by member of one group, then by turn of that member.

        A_E[i] = compared(sums of turn_rewards)[i]                             of the episode, undiscounted (eq. 3)
        G[i, t] = turn_rewards[i][t] + gamma * G[i, t + 1]                     (eq. 5)
        A_S[i, t] = same_state_advantages(state_keys, G)[i, t]                 (eq. 7)
        advantage[i, t] = A_E[i] + same_state_weight * A_S[i, t]               (eq. 8)

    verl-agent, by GiGPO's authors, takes mean and deviation of A_E over turns, so a long episode counts more often.
    This function follows the paper: over episodes.

    Two attempts at one task: the first acts correctly in state s at once, the other after a detour through t.

    >>> both = gigpo_advantages(
    ...     [np.array([1.0]), np.array([0.0, 0.0, 1.0])], [["s"], ["s", "t", "s"]],
    ...     gamma=0.5, same_state_weight=1.0, compared=centred_advantages,
    ... )
    >>> [each.tolist() for each in both]  # A_E is 0; in s, returns of 1, 0.25 and 1 have a mean of 0.75
    [[0.25], [-0.5, 0.0, 0.25]]
    """
    returns = np.concatenate([returns_to_go(rewards, gamma=gamma) for rewards in turn_rewards])
    same_state = same_state_advantages([key for keys in state_keys for key in keys], returns, compared=compared)
    stops = np.cumsum([len(rewards) for rewards in turn_rewards])[:-1]
    of_episodes = compared([math.fsum(rewards) for rewards in turn_rewards])
    return [
        of_episode + same_state_weight * of_turns
        for of_episode, of_turns in zip(of_episodes, np.split(same_state, stops), strict=True)
    ]


def own_advantages(name: str, returns: Sequence[float]) -> npt.NDArray[np.float64]:
    """The advantages of a group by the user's function `name`. Raises ConfigError for a result of another shape, or
    that is not finite.
    """
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
