"""Numbers of the sampled tokens of a trajectory: their rewards, by `objective.allocation`, and their credit.

Every allocation conserves the return: the rewards of the tokens add up to those of the turns. Only sampled tokens are
counted, turn after turn; tokens of the environment are not. All arithmetic is float64 on the host.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from slipstream.common.records.trajectory import Trajectory

Numbers = Float[np.ndarray, " _tokens"]  # one for each sampled token of an episode, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCredit:
    """Numbers for each sampled token of an episode, in order."""

    advantages: Numbers
    returns: Numbers | None = None  # the critic's targets; None without a critic
    trained_from: int = 0  # the token of the episode before which no token is trained: a sibling trains those


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


def last_token(
    turn_rewards: Float[np.ndarray, " turns"], turn_tokens: Int[np.ndarray, " turns"]
) -> Float[np.ndarray, " tokens"]:
    """The whole return on the trajectory's last sampled token, as in RLHF: https://arxiv.org/abs/2203.02155.

    >>> last_token(np.array([1.0, -0.5]), np.array([2, 3])).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.5]
    """
    rewards = np.zeros(int(turn_tokens.sum()))
    rewards[-1] = turn_rewards.sum()
    return rewards


def per_turn(
    turn_rewards: Float[np.ndarray, " turns"], turn_tokens: Int[np.ndarray, " turns"]
) -> Float[np.ndarray, " tokens"]:
    """The reward of each turn on its last token.

    >>> per_turn(np.array([1.0, -0.5]), np.array([2, 3])).tolist()
    [0.0, 1.0, 0.0, 0.0, -0.5]
    """
    rewards = np.zeros(int(turn_tokens.sum()))
    rewards[np.cumsum(turn_tokens) - 1] = turn_rewards
    return rewards


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
