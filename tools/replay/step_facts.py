"""The facts of an optimizer step and of its groups, for the viewer."""

from statistics import fmean
from typing import Any

import numpy as np

from slipstream.common.records.version_lag import lags
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.archive import ArchivedStep


def step_facts(archived: ArchivedStep) -> dict[str, Any]:
    """One step in numbers. Shares are of turns, lengths in sampled tokens, log-probabilities means per token."""
    trajectories = [trajectory for group in archived.groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(turn.stop - turn.start for turn in turns)
    of_groups = [group_facts(group, archived)["lag"] for group in archived.groups]
    return {
        "policy_version": archived.policy_version,
        "num_groups": len(archived.groups),
        "num_trajectories": len(trajectories),
        "trained_reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "trained_success": fmean(trajectory.success for trajectory in trajectories),
        "lag_mean": fmean(of_groups),
        "lag_max": max(of_groups),
        "turns_mean": len(turns) / len(trajectories),
        "sampled_tokens_mean": sampled / len(trajectories),
        "valid_actions": fmean(turn.valid_action for turn in turns),
        "cut_by_length": fmean(turn.finish_reason == "length" for turn in turns),
        "logprob_mean": sum(float(t.behaviour_logprob_array().sum()) for t in trajectories) / sampled,
    }


def group_facts(group: Group, archived: ArchivedStep) -> dict[str, Any]:
    """One group as the learner got it; `lag` is that of the oldest token."""
    oldest = min(trajectory.oldest_policy_version for trajectory in group.trajectories)
    return {
        "group_id": group.ticket.group_id,
        "task": group.ticket.task.task_id,
        "returns": [trajectory.total_reward for trajectory in group.trajectories],
        "lag": lag_of(oldest, archived),
    }


def lag_of(version: int, archived: ArchivedStep) -> int:
    """The lag of `version` in optimizer steps."""
    at, resumptions = archived.policy_version, archived.resumptions
    return int(lags(np.array([version], np.int32), policy_version=at, resumptions=resumptions)[0])
