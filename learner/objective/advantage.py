"""How much better an attempt was than its siblings or than the batch: host arithmetic in float64, without gradient.

What compares siblings gives one number a trajectory, which `learner.weigh` gives to every token of it; what compares
tokens or turns gives one number each.
"""

import math
from collections.abc import Callable, Sequence

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


def same_state_advantages(
    state_keys: Sequence[str],
    returns: Float[np.ndarray, " turns"],
    *,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> Float[np.ndarray, " turns"]:
    """Each turn among those that began in the same state: what GiGPO calls the step relative advantage (its eq. 7).

    `state_keys` and `returns` (discounted, to go) are of all turns of all members of one group; `compared` is
    `standardised_advantages` or `centred_advantages`.

        advantage[k] = compared(returns of the turns with state_keys[k])[k]

    A state that was met once has nothing to be compared with, and neither has a turn whose state is not known ("": no
    two of them need be the same): 0.

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
    """GiGPO, https://arxiv.org/abs/2505.10978: each turn by how its attempt ended and by what others did in its state.

    Both arguments are by member of one group, and by turn of that member.

        A_E[i] = compared(sums of turn_rewards)[i]                             of the episode, undiscounted (eq. 3)
        G[i, t] = turn_rewards[i][t] + gamma * G[i, t + 1]                     (eq. 5)
        A_S[i, t] = same_state_advantages(state_keys, G)[i, t]                 (eq. 7)
        advantage[i, t] = A_E[i] + same_state_weight * A_S[i, t]               (eq. 8)

    verl-agent, by GiGPO's authors, takes the mean and deviation of A_E over turns, so that a long episode counts more
    often; this is the paper's, over episodes.

    Two attempts at one task: the first does the right thing in state s at once, the other after a detour through t.

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
