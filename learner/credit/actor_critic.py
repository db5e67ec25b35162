"""PPO's and V-trace's advantages: tokens are compared with the values of a critic."""

from collections.abc import Sequence

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.credit.gae import bi_level_gae, gae
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, penalised_rewards, penalties_of_turns
from slipstream.learner.credit.reinforce_pp import standardised_over_batch
from slipstream.learner.credit.token_rewards import TokenCredit, rewards_of_turns, tokens_of_turns
from slipstream.learner.credit.vtrace import vtrace


def actor_critic(episodes: Sequence[MeasuredTrajectory], objective: ObjectiveConfig) -> list[TokenCredit]:
    """The credit of each episode; except for V-trace, advantages are standardised over the batch.

    Every rank has the whole batch, so its mean and its deviation are the same on every rank.
    """
    estimates = [_estimate(episode, objective) for episode in episodes]
    if objective.advantage == "vtrace":
        return estimates
    advantages = standardised_over_batch([estimate.advantages for estimate in estimates])
    return [
        TokenCredit(advantages=each, returns=estimate.returns)
        for each, estimate in zip(advantages, estimates, strict=True)
    ]


def _estimate(episode: MeasuredTrajectory, objective: ObjectiveConfig) -> TokenCredit:
    values, rewards = episode.values, penalised_rewards(episode, objective)
    match objective.advantage:
        case "gae":
            advantages = gae(rewards, values=values, gamma=objective.gamma, lam=objective.gae_lambda)
        case "bi_level_gae":
            advantages = bi_level_gae(
                rewards_of_turns(episode.trajectory) - penalties_of_turns(episode),
                values,
                tokens_of_turns(episode.trajectory),
                turn_gamma=objective.turn_gamma,
                token_gamma=objective.gamma,
                lam=objective.gae_lambda,
            )
        case "vtrace":
            return vtrace(rewards, values=values, lagged_ratio=episode.lagged_ratios, gamma=objective.gamma)
        case unknown:
            raise ValueError(f"no advantage {unknown!r} with a critic")
    return TokenCredit(advantages=advantages, returns=advantages + values)
