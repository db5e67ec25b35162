"""On-policy distillation: a token is worth how much more likely a teacher finds it than the policy that sampled it."""

from collections.abc import Sequence

from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.token_rewards import Numbers


def distillation(episodes: Sequence[MeasuredTrajectory]) -> list[Numbers]:
    """One advantage for each token of each episode.

        advantage[t] = kl_coefficient * (log teacher[t] - log behaviour[t])

    Its mean over tokens of the current policy is -KL(policy || teacher), the reverse divergence. This is on-policy
    distillation (https://arxiv.org/abs/2306.13649). A token is credited for itself alone: what it makes likely later is
    left out.

    With a teacher at -0.5 and a policy at -1, the advantage is 0.5.
    """
    return [-episode.penalties for episode in episodes]
