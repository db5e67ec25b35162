"""Per-token advantages of a batch: groups in, token sequences with advantages out, by `objective.advantage`."""

from collections.abc import Sequence

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import TokenSequence, numbered, sequences_of
from slipstream.learner.credit import gigpo, grpo
from slipstream.learner.credit.actor_critic import actor_critic
from slipstream.learner.credit.distillation import distillation
from slipstream.learner.credit.measure import Measured, measured_trajectories
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.reinforce_pp import reinforce_pp
from slipstream.learner.credit.token_rewards import Numbers, TokenCredit, over_all_tokens
from slipstream.learner.credit.tree import tree
from slipstream.replay.records.ticket import Group


def sequences_with_advantages(
    groups: Sequence[Group], *, objective: ObjectiveConfig, measured: Measured | None = None
) -> list[TokenSequence]:
    """Every sequence of a batch, with the advantage of each token.

    With a critic, also with its values and targets. `measured` must be of this batch; it may be left out if the
    objective needs no measurements.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = measured_trajectories(trajectories, objective=objective, measured=measured or Measured())
    remaining = iter(episodes)
    members = [[next(remaining) for _ in group.trajectories] for group in groups]
    match objective.compares:
        case "siblings":
            found = _without_critic([each for group in members for each in grpo.grpo(group, objective)])
        case "states":
            found = _without_critic([each for group in members for each in gigpo.gigpo(group, objective)])
        case "forks":
            found = tree(groups, members, objective)
        case "batch":
            found = _without_critic(reinforce_pp(episodes, objective))
        case "teacher":
            found = _without_critic(distillation(episodes))
        case _:
            found = actor_critic(episodes, objective)
    return numbered(_sequences(episode, credit) for episode, credit in zip(episodes, found, strict=True))


def compares_returns(objective: ObjectiveConfig) -> bool:
    """Whether a group teaches nothing exactly if all its members have the same return, known when it is finished."""
    whole = objective.compares == "forks" or (objective.compares == "siblings" and objective.allocation != "per_turn")
    return whole and not objective.returns_come_later and "advantage" not in objective.own_parts


def teaches(group: Group, *, objective: ObjectiveConfig) -> bool:
    """Whether any token of the group can have an advantage other than 0; if not, the surrogate has no gradient."""
    if not objective.compares_siblings or objective.returns_come_later:
        return True
    if objective.compares == "states":
        return gigpo.teaches(group.trajectories, objective)
    return grpo.teaches(group.trajectories, objective)


def _without_critic(advantages: Sequence[Numbers]) -> list[TokenCredit]:
    return [TokenCredit(advantages=of_episode) for of_episode in advantages]


def _sequences(episode: MeasuredTrajectory, credit: TokenCredit) -> list[TokenSequence]:
    """The sequences of an episode; with a critic also with its values and targets."""
    trajectory, returns = episode.trajectory, credit.returns
    return sequences_of(
        trajectory,
        advantage=over_all_tokens(trajectory, credit.advantages),
        old_values=None if returns is None else over_all_tokens(trajectory, episode.values),
        returns=None if returns is None else over_all_tokens(trajectory, returns),
        trained_from=credit.trained_from,
    )
