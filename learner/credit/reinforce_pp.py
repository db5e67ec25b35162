"""REINFORCE++: the return from each token on, compared with those of all tokens of the batch."""

from collections.abc import Sequence

import numpy as np

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.credit.grpo import RETURN_RESOLUTION
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, penalised_rewards
from slipstream.learner.credit.token_rewards import Numbers, returns_to_go


def reinforce_pp(episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig) -> list[Numbers]:
    """One advantage for each token of each episode."""
    rewards = [penalised_rewards(episode, objective) for episode in episodes]
    return standardised_over_batch([returns_to_go(each, gamma=objective.gamma) for each in rewards])


def standardised_over_batch(numbers: Sequence[Numbers]) -> list[Numbers]:
    """Each token's number minus the mean over all tokens of the batch, in standard deviations; no unit.

    REINFORCE++, https://arxiv.org/abs/2501.03262, applies it to returns-to-go: the batch is the baseline, so attempts
    are compared across tasks. PPO implementations, https://arxiv.org/abs/2005.12729, apply it to GAE's advantages.

        advantage[t] = (X[t] - mean(X)) / (std(X) + 1e-6)    over every loss token of the batch

    >>> [each.round(3).tolist() for each in standardised_over_batch([np.array([3.0, 3.0]), np.array([0.0, 0.0])])]
    [[1.0, 1.0], [-1.0, -1.0]]
    """
    whole = np.concatenate(numbers)
    whole = whole - whole[:1]  # as in `_group` of GRPO
    stops = np.cumsum([len(each) for each in numbers])[:-1]
    return np.split((whole - whole.mean()) / (whole.std() + RETURN_RESOLUTION), stops)
