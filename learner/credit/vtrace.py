"""V-trace: targets and advantages for a critic, corrected for tokens that an older policy sampled."""

import numpy as np
from jaxtyping import Float

from slipstream.learner.credit.token_rewards import TokenCredit


def vtrace(
    rewards: Float[np.ndarray, " tokens"],
    *,
    values: Float[np.ndarray, " tokens"],
    lagged_ratio: Float[np.ndarray, " tokens"],
    gamma: float,
) -> TokenCredit:
    """IMPALA's targets and advantages, https://arxiv.org/abs/1802.01561, over one trajectory that ended.

    The advantages contain the truncated ratio: the surrogate is -A * current.

        rho[t] = min(ratio[t], 1),  ratio = current / behaviour
        delta[t] = rho[t] * (rewards[t] + gamma * values[t + 1] - values[t])
        targets[t] = values[t] + delta[t] + gamma * rho[t] * (targets[t + 1] - values[t + 1])
        advantage[t] = rho[t] * (rewards[t] + gamma * targets[t + 1] - values[t])

    The paper has a bound for what a token propagates of later rewards, c, beside rho's; both are 1 in its runs.

    >>> values, ratios = np.array([0.5, 0.6]), np.array([0.5, 3.0])
    >>> found = vtrace(np.array([0.0, 1.0]), values=values, lagged_ratio=ratios, gamma=1.0)
    >>> found.returns.round(3).tolist(), found.advantages.round(3).tolist()
    ([0.75, 1.0], [0.25, 0.4])
    """
    rho = np.minimum(lagged_ratio, 1.0)
    targets, advantages = np.zeros(len(values)), np.zeros(len(values))
    next_value = next_target = 0.0
    for token in reversed(range(len(values))):
        delta = rho[token] * (rewards[token] + gamma * next_value - values[token])
        advantages[token] = rho[token] * (rewards[token] + gamma * next_target - values[token])
        targets[token] = values[token] + delta + gamma * rho[token] * (next_target - next_value)
        next_value, next_target = values[token], targets[token]
    return TokenCredit(advantages=advantages, returns=targets)
