"""Advantages of attempts that fork from each other: a group's attempts as leaves of trees, as their records say."""

from collections.abc import Sequence

import numpy as np

from slipstream.common.config.objective_config import TREE, ObjectiveConfig
from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.learner.batch.pack import TokenSequence, sequences_of
from slipstream.learner.credit.measured_trajectory import MeasuredTrajectory
from slipstream.learner.credit.token_rewards import over_all_tokens, tokens_of_turns
from slipstream.learner.objective.tree import Leaf, TurnCredit, tree_advantages
from slipstream.replay.records.ticket import Group


def advantages_by_tree(
    groups: Sequence[Group], episodes: Sequence[Sequence[MeasuredTrajectory]], objective: ObjectiveConfig
) -> list[list[TokenSequence]]:
    """One advantage for each turn, compared at the node where its segment begins; its weight in the loss multiplies it.

    Penalties are subtracted from the returns. A token that several attempts share is trained in one of them. Weights
    are scaled so that the loss stays a mean: over its tokens, or with normalisation `constant` over its attempts.
    """
    trajectories, credits = list[Trajectory](), list[TurnCredit]()
    for group, members in zip(groups, episodes, strict=True):
        returns = [member.trajectory.total_reward - float(member.penalties.sum()) for member in members]
        leaves = leaves_of(group.trajectories, returns)
        credits += tree_advantages(leaves, num_trees=group.ticket.num_trees or len(leaves))
        trajectories += group.trajectories
    tokens = [tokens_of_turns(trajectory) for trajectory in trajectories]
    total_weight = sum(float((credit.weights * each).sum()) for credit, each in zip(credits, tokens, strict=True))
    num_trained = sum(int(each[credit.weights > 0].sum()) for credit, each in zip(credits, tokens, strict=True))
    scale = num_trained / total_weight
    if objective.normalisation == "constant":
        scale = len(trajectories) / sum(credit.weights[0] for credit in credits)
    sequences: list[list[TokenSequence]] = []
    for trajectory, credit, each in zip(trajectories, credits, tokens, strict=True):
        of_sampled = np.repeat(scale * credit.weights * credit.advantages, each)
        first = int(np.flatnonzero(credit.weights)[0])
        sequences.append(
            sequences_of(
                trajectory,
                advantage=over_all_tokens(trajectory, of_sampled),
                trained_from=trajectory.turns[first].start,
            )
        )
    return sequences


def why_not_trained(trajectories: Sequence[Trajectory], objective: ObjectiveConfig) -> str:
    """Why `objective` cannot train attempts that were made for another one; "" if it can.

    A run may be resumed with another objective than its waiting groups were played for, and an archive re-run with one.
    """
    if objective.advantage != TREE and any(trajectory.fork for trajectory in trajectories):
        return (
            f"its attempts fork from each other, and objective.advantage {objective.advantage} would train the tokens "
            f"that they share once for each of them; choose {TREE}"
        )
    if objective.teacher_url and any(trajectory.kept for trajectory in trajectories):
        return (
            "its tokens were sampled from kept sets, and a teacher behind a URL gives log-probabilities of the whole "
            "distribution; use a folder as objective.reference_model"
        )
    return ""


def leaves_of(trajectories: Sequence[Trajectory], returns: Sequence[float]) -> list[Leaf]:
    """Return a leaf for each member of a group, in their order.

    A fork whose parent has other tokens there is no fork of it: it begins at the start then. So is one whose parent is
    over at that turn.
    """
    forks: list[Fork | None] = []
    for trajectory in trajectories:
        fork = _first_place(trajectory.fork, forks)
        if fork is not None and not _shares(trajectory, trajectories[fork.parent], fork.num_turns):
            fork = None
        forks.append(fork)
    return [
        Leaf(total=total, num_turns=len(trajectory.turns), fork=fork)
        for trajectory, total, fork in zip(trajectories, returns, forks, strict=True)
    ]


def _first_place(fork: Fork | None, before: Sequence[Fork | None]) -> Fork | None:
    """The same place in the first member that sampled it: a fork may name a member that has it from a parent."""
    while fork is not None and (earlier := before[fork.parent]) is not None and fork.num_turns <= earlier.num_turns:
        fork = Fork(parent=earlier.parent, num_turns=fork.num_turns)
    return fork


def _shares(trajectory: Trajectory, parent: Trajectory, num_turns: int) -> bool:
    """Whether both have the same tokens and log-probabilities before turn `num_turns`, and the parent has that turn."""
    if num_turns >= len(parent.turns):
        return False
    stop = 4 * trajectory.turns[num_turns].start
    return (
        trajectory.tokens[:stop] == parent.tokens[:stop]
        and trajectory.behaviour_logprobs[:stop] == parent.behaviour_logprobs[:stop]
        and trajectory.turns[num_turns].start == parent.turns[num_turns].start
    )
