"""GiGPO: attempts are compared with their siblings, and turns with those that began in the same state."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.credit.grpo import centred_advantages, is_any, standardised_advantages
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, penalties_of_turns
from slipstream.learner.credit.token_rewards import Numbers, returns_to_go, rewards_of_turns, tokens_of_turns

COMPARED = {"gigpo": standardised_advantages, "gigpo_centred": centred_advantages}


def gigpo(members: Sequence[MeasuredTrajectory], objective: ObjectiveConfig) -> list[Numbers]:
    """One advantage for each turn of a group.

    Penalties are compared in the same way, but never in standard deviations: see `slipstream.learner.credit.grpo`.
    """
    trajectories, gamma = [member.trajectory for member in members], objective.gamma
    rewards, keys = [rewards_of_turns(trajectory) for trajectory in trajectories], _state_keys(trajectories)
    gains = gigpo_advantages(rewards, keys, gamma=gamma, compared=COMPARED[objective.advantage])
    penalties = [penalties_of_turns(member) for member in members]
    losses = gigpo_advantages(penalties, keys, gamma=gamma, compared=centred_advantages)
    return [
        np.repeat(gain - loss, tokens_of_turns(trajectory))
        for trajectory, gain, loss in zip(trajectories, gains, losses, strict=True)
    ]


def teaches(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> bool:
    """Whether any turn of a group can have an advantage other than 0."""
    rewards = [rewards_of_turns(trajectory) for trajectory in trajectories]
    keys, gamma = _state_keys(trajectories), objective.gamma
    return any(map(is_any, gigpo_advantages(rewards, keys, gamma=gamma, compared=centred_advantages)))


def _state_keys(trajectories: Sequence[Trajectory]) -> list[list[str]]:
    return [[turn.state_key for turn in trajectory.turns] for trajectory in trajectories]


def gigpo_advantages(
    turn_rewards: Sequence[Float[np.ndarray, " _turns"]],
    state_keys: Sequence[Sequence[str]],
    *,
    gamma: float,
    compared: Callable[[Sequence[float]], npt.NDArray[np.float64]],
) -> list[Float[np.ndarray, " _turns"]]:
    """GiGPO, https://arxiv.org/abs/2505.10978: compares attempts with siblings, and turns with those in the same state.

    Both arguments are indexed by member of one group, then by turn of that member.

        A_E[i] = compared(sums of turn_rewards)[i]                             of the episode, undiscounted (eq. 3)
        G[i, t] = turn_rewards[i][t] + gamma * G[i, t + 1]                     (eq. 5)
        A_S[i, t] = same_state_advantages(state_keys, G)[i, t]                 (eq. 7)
        advantage[i, t] = A_E[i] + A_S[i, t]                                   (eq. 8, with a weight of 1)

    verl-agent, by GiGPO's authors, takes mean and deviation of A_E over turns, so a long episode counts more often.
    This function follows the paper: over episodes.

    Two attempts at one task: the first acts correctly in state s at once, the other after a detour through t.

    >>> both = gigpo_advantages(
    ...     [np.array([1.0]), np.array([0.0, 0.0, 1.0])], [["s"], ["s", "t", "s"]],
    ...     gamma=0.5, compared=centred_advantages,
    ... )
    >>> [each.tolist() for each in both]  # A_E is 0; in s, returns of 1, 0.25 and 1 have a mean of 0.75
    [[0.25], [-0.5, 0.0, 0.25]]
    """
    returns = np.concatenate([returns_to_go(rewards, gamma=gamma) for rewards in turn_rewards])
    same_state = same_state_advantages([key for keys in state_keys for key in keys], returns, compared=compared)
    stops = np.cumsum([len(rewards) for rewards in turn_rewards])[:-1]
    of_episodes = compared([math.fsum(rewards) for rewards in turn_rewards])
    return [
        of_episode + of_turns for of_episode, of_turns in zip(of_episodes, np.split(same_state, stops), strict=True)
    ]


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
