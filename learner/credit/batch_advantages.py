"""Advantages of tokens that are compared with no sibling: with all tokens of the batch, a teacher or a critic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import TokenSequence, sequences_of
from slipstream.learner.credit.measure import Numbers
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, penalised_rewards, penalised_turn_rewards
from slipstream.learner.credit.token_rewards import over_all_tokens, tokens_of_turns
from slipstream.learner.objective.advantage import batch_standardised_advantages, returns_to_go
from slipstream.learner.objective.gae import bi_level_gae, gae
from slipstream.learner.objective.vtrace import vtrace


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageEstimate:
    """Numbers for each sampled token of an episode."""

    advantages: Numbers
    returns: Numbers  # the critic's targets


def advantages_by_batch(
    episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per token, compared with every loss token of the batch."""
    returns = [returns_to_go(penalised_rewards(episode, objective), gamma=objective.gamma) for episode in episodes]
    sequences: list[list[TokenSequence]] = []
    for episode, advantages in zip(episodes, _standardised(returns), strict=True):
        sequences.append(sequences_of(episode.trajectory, advantage=over_all_tokens(episode.trajectory, advantages)))
    return sequences


def advantages_by_teacher(episodes: Sequence[MeasuredTrajectory]) -> list[list[TokenSequence]]:
    """One advantage per token: how much more likely the teacher finds it than the policy that sampled it.

        advantage[t] = kl_coefficient * (log teacher[t] - log behaviour[t])

    Its mean over tokens of the current policy is -KL(policy || teacher), the reverse divergence. This is on-policy
    distillation (https://arxiv.org/abs/2306.13649). A token is credited for itself alone: what it makes likely later is
    left out.

    With a teacher at -0.5 and a policy at -1, the advantage is 0.5.
    """
    return [
        sequences_of(episode.trajectory, advantage=over_all_tokens(episode.trajectory, -episode.penalties))
        for episode in episodes
    ]


def advantages_by_critic(
    episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage per token, compared with the critic's value; except for V-trace, standardised over the batch.

    Every rank has the whole batch, so its mean and its deviation are the same on every rank.
    """
    estimates = [_estimate(episode, objective) for episode in episodes]
    advantages = [estimate.advantages for estimate in estimates]
    if objective.advantage != "vtrace":
        advantages = _standardised(advantages)
    sequences: list[list[TokenSequence]] = []
    for episode, estimate, of_sampled in zip(episodes, estimates, advantages, strict=True):
        sequences.append(
            sequences_of(
                episode.trajectory,
                advantage=over_all_tokens(episode.trajectory, of_sampled),
                old_values=over_all_tokens(episode.trajectory, episode.values),
                returns=over_all_tokens(episode.trajectory, estimate.returns),
            )
        )
    return sequences


def _estimate(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> AdvantageEstimate:
    values, rewards = episode.values, penalised_rewards(episode, objective)
    match objective.advantage:
        case "gae":
            advantages = gae(rewards, values=values, gamma=objective.gamma, lam=objective.gae_lambda)
        case "bi_level_gae":
            advantages = bi_level_gae(
                penalised_turn_rewards(episode),
                values,
                tokens_of_turns(episode.trajectory),
                turn_gamma=objective.turn_gamma,
                turn_lam=objective.turn_lambda,
                token_gamma=objective.gamma,
                token_lam=objective.gae_lambda,
            )
        case "vtrace":
            found = vtrace(
                rewards,
                values=values,
                lagged_ratio=episode.lagged_ratios,
                gamma=objective.gamma,
                max_rho=objective.max_rho,
            )
            return AdvantageEstimate(advantages=found.advantages, returns=found.targets)
        case unknown:
            raise ValueError(f"no advantage {unknown!r} with a critic")
    return AdvantageEstimate(advantages=advantages, returns=advantages + values)


def _standardised(numbers: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """Standardise over the tokens of all episodes together."""
    stops = np.cumsum([len(each) for each in numbers])[:-1]
    return np.split(batch_standardised_advantages(np.concatenate(numbers)), stops)
