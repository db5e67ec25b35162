"""Generalised advantage estimation over the sampled tokens, given a critic's values.

Tokens are the sampled ones of one trajectory, turn after turn. Tokens of the environment in between are skipped, so the
value after a turn's last token is that of the next turn's first. Every trajectory has ended, so nothing is bootstrapped
after the last token. All arithmetic is float64 on the host.
"""

import numpy as np
from jaxtyping import Float, Int


def gae(
    rewards: Float[np.ndarray, " tokens"], *, values: Float[np.ndarray, " tokens"], gamma: float, lam: float
) -> Float[np.ndarray, " tokens"]:
    """GAE, https://arxiv.org/abs/1506.02438; `values[t]` is the critic's value before token t is sampled.

        delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
        advantage[t] = delta[t] + gamma * lam * advantage[t + 1]

    `advantage + values` are the critic's targets.

    >>> gae(np.array([0.0, 0.0, 1.0]), values=np.array([0.5, 0.6, 0.8]), gamma=1.0, lam=0.5).round(3).tolist()
    [0.25, 0.3, 0.2]
    """
    advantages, following, next_value = np.zeros(len(rewards)), 0.0, 0.0
    for token in reversed(range(len(rewards))):
        delta = rewards[token] + gamma * next_value - values[token]
        following = delta + gamma * lam * following
        next_value = values[token]
        advantages[token] = following
    return advantages


def bi_level_gae(
    turn_rewards: Float[np.ndarray, " turns"],
    values: Float[np.ndarray, " tokens"],
    turn_tokens: Int[np.ndarray, " turns"],
    *,
    turn_gamma: float,
    token_gamma: float,
    lam: float,
) -> Float[np.ndarray, " tokens"]:
    """VAGEN's bi-level GAE, https://arxiv.org/abs/2510.16907: first over turns, then over the tokens inside each.

        A_turn = gae(turn_rewards, values at each turn's last token, turn_gamma, lam)
        inside turn k: A = gae(rewards that are 0 but on the last token, values, token_gamma, lam)
                       where the last token's reward is A_turn[k] + its value, so that its advantage is A_turn[k]

    >>> turns, values = np.array([2, 1]), np.array([0.4, 0.5, 0.8])
    >>> bi_level_gae(np.array([0.0, 1.0]), values, turns, turn_gamma=1.0, token_gamma=1.0, lam=0.5).round(3).tolist()
    [0.3, 0.4, 0.2]
    """
    ends = np.cumsum(turn_tokens)
    turn_advantages = gae(turn_rewards, values=values[ends - 1], gamma=turn_gamma, lam=lam)
    advantages = np.zeros(len(values))
    for turn, (start, stop) in enumerate(zip(ends - turn_tokens, ends, strict=True)):
        rewards = np.zeros(stop - start)
        rewards[-1] = turn_advantages[turn] + values[stop - 1]
        advantages[start:stop] = gae(rewards, values=values[start:stop], gamma=token_gamma, lam=lam)
    return advantages
