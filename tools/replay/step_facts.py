"""The facts of an optimizer step and of its groups, for the viewer."""

from statistics import fmean
from typing import Any

from slipstream.tools.replay.run_records import RecordedGroup, RecordedStep


def step_facts(recorded: RecordedStep) -> dict[str, Any]:
    """One step in numbers. Shares are of turns, lengths in sampled tokens, log-probabilities means per token."""
    trajectories = [trajectory for group in recorded.groups for trajectory in group.trajectories.values()]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(turn.stop - turn.start for turn in turns)
    lags = [group_facts(group, recorded)["lag"] for group in recorded.groups]
    return {
        "policy_version": recorded.policy_version,
        "num_groups": len(recorded.groups),
        "num_trajectories": len(trajectories),
        "trained_reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "trained_success": fmean(trajectory.success for trajectory in trajectories),
        "lag_mean": fmean(lags),
        "lag_max": max(lags),
        "turns_mean": len(turns) / len(trajectories),
        "sampled_tokens_mean": sampled / len(trajectories),
        "valid_actions": fmean(turn.valid_action for turn in turns),
        "cut_by_length": fmean(turn.finish_reason == "length" for turn in turns),
        "logprob_mean": sum(float(t.behaviour_logprob_array().sum()) for t in trajectories) / sampled,
    }


def group_facts(group: RecordedGroup, recorded: RecordedStep) -> dict[str, Any]:
    """One group as the learner got it; `lag` is that of the oldest token."""
    oldest = min(trajectory.oldest_policy_version for trajectory in group.trajectories.values())
    return {
        "group_id": group.ticket.group_id,
        "task": group.ticket.task.task_id,
        "returns": [trajectory.total_reward for trajectory in group.trajectories.values()],
        "lag": recorded.lag_of(oldest),
    }
