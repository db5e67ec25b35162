"""Distributes the rewards of turns over tokens: rewards per turn in, rewards per sampled token out.

Every allocation conserves the return: the rewards of the tokens add up to those of the turns. Only sampled tokens are
counted, turn after turn; tokens of the environment are not. All arithmetic is float64 on the host.
"""

import numpy as np
from jaxtyping import Float, Int


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
