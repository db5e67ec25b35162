"""Per-token advantages of a batch: groups in, token sequences with advantages out, by `objective.advantage`."""

from collections.abc import Sequence

from slipstream.common.config.objective_config import DISTILLATION, TREE, WITH_CRITIC, ObjectiveConfig
from slipstream.learner.batch.pack import TokenSequence, numbered
from slipstream.learner.credit.batch_advantages import advantages_by_batch, advantages_by_critic, advantages_by_teacher
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory, measured_trajectories
from slipstream.learner.credit.sibling_advantages import (
    GROUP_RELATIVE,
    TURN_RELATIVE,
    advantages_by_group,
    advantages_by_turn,
    advantages_of_turns,
    same_state_advantages,
)
from slipstream.learner.credit.token_rewards import rewards_of_turns
from slipstream.learner.credit.tree import advantages_by_tree
from slipstream.learner.objective.advantage import RETURN_RESOLUTION, centred_advantages, own_advantages, returns_differ
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
    if objective.advantage in GROUP_RELATIVE or "advantage" in objective.own_parts:
        return numbered(advantages_by_group(_members(groups, episodes), objective))
    if objective.advantage in TURN_RELATIVE:
        return numbered(advantages_by_turn(_members(groups, episodes), objective))
    if objective.advantage == TREE:
        return numbered(advantages_by_tree(groups, _members(groups, episodes), objective))
    if objective.advantage == DISTILLATION:
        return numbered(advantages_by_teacher(episodes))
    if objective.advantage in WITH_CRITIC:
        return numbered(advantages_by_critic(episodes, objective))
    return numbered(advantages_by_batch(episodes, objective))


def teaches(group: Group, *, objective: ObjectiveConfig) -> bool:
    """Whether any token of the group can have an advantage other than 0; if not, the surrogate has no gradient."""
    if not objective.compares_siblings or objective.returns_come_later:
        return True
    if objective.advantage in TURN_RELATIVE:
        rewards = [rewards_of_turns(trajectory) for trajectory in group.trajectories]
        advantages = same_state_advantages(group.trajectories, rewards, objective, compared=centred_advantages)
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in advantages)
    if objective.allocation == "per_turn" and objective.advantage in GROUP_RELATIVE:
        advantages = advantages_of_turns(group.trajectories, centred_advantages)
        return any(bool((abs(each) > RETURN_RESOLUTION).any()) for each in advantages)
    returns = [trajectory.total_reward for trajectory in group.trajectories]
    if "advantage" in objective.own_parts:
        return bool((abs(own_advantages(objective.advantage, returns)) > RETURN_RESOLUTION).any())
    return returns_differ(returns)


def _members(groups: Sequence[Group], episodes: Sequence[MeasuredTrajectory]) -> list[list[MeasuredTrajectory]]:
    """The episodes of each group."""
    remaining = iter(episodes)
    return [[next(remaining) for _ in group.trajectories] for group in groups]
