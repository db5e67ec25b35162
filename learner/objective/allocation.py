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


def uniform_positive(
    turn_rewards: Float[np.ndarray, " turns"], turn_tokens: Int[np.ndarray, " turns"]
) -> Float[np.ndarray, " tokens"]:
    """A return above 0 in equal parts on all sampled tokens; any other return on the last token.

        rewards[t] = return / tokens    if return > 0, else last_token

    >>> uniform_positive(np.array([1.0, -0.5]), np.array([2, 3])).tolist()
    [0.1, 0.1, 0.1, 0.1, 0.1]
    >>> uniform_positive(np.array([0.0, -0.5]), np.array([2, 3])).tolist()
    [0.0, 0.0, 0.0, 0.0, -0.5]
    """
    total, num_tokens = turn_rewards.sum(), int(turn_tokens.sum())
    if total > 0:
        return np.full(num_tokens, total / num_tokens)
    return last_token(turn_rewards, turn_tokens)


def discounted(
    turn_rewards: Float[np.ndarray, " turns"], turn_tokens: Int[np.ndarray, " turns"], *, discount: float
) -> Float[np.ndarray, " tokens"]:
    """The return split over the last tokens of the turns; each turn's part is `discount` times that of the next turn.

        part[k] = return * discount^(last - k) / sum over turns j of discount^(last - j)

    >>> discounted(np.array([0.0, 3.0]), np.array([2, 3]), discount=0.5).tolist()
    [0.0, 1.0, 0.0, 0.0, 2.0]
    """
    parts = discount ** np.arange(len(turn_rewards) - 1, -1, -1, dtype=np.float64)
    return per_turn(turn_rewards.sum() * parts / parts.sum(), turn_tokens)


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
