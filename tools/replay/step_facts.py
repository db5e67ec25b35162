"""The facts of an optimizer step and of its groups, for the viewer."""

from statistics import fmean
from typing import Any

from slipstream.learner.credit.grpo import RETURN_RESOLUTION, centred_advantages
from slipstream.tools.replay.run_records import RecordedGroup, RecordedStep


def step_facts(recorded: RecordedStep) -> dict[str, Any]:
    """One step in numbers. Shares are of turns, lengths in sampled tokens, log-probabilities means per token."""
    trajectories = [trajectory for group in recorded.groups for trajectory in group.trajectories.values()]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    groups = [group_facts(group, recorded) for group in recorded.groups]
    sampled = sum(turn.stop - turn.start for turn in turns)
    lags = [facts["lag"] for facts in groups]
    return {
        "step": recorded.step,
        "policy_version": recorded.policy_version,
        "num_groups": len(groups),
        "num_trajectories": len(trajectories),
        "num_tasks": len({facts["task"] for facts in groups}),
        "trained_reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "trained_success": fmean(trajectory.success for trajectory in trajectories),
        "equal_groups": sum(set(facts["advantages"]) == {"0"} for facts in groups),
        "lag_mean": fmean(lags),
        "lag_max": max(lags),
        "turns_mean": len(turns) / len(trajectories),
        "sampled_tokens_mean": sampled / len(trajectories),
        "valid_actions": fmean(turn.valid_action for turn in turns),
        "cut_by_length": fmean(turn.finish_reason == "length" for turn in turns),
        "logprob_mean": sum(float(t.behaviour_logprob_array().sum()) for t in trajectories) / sampled,
    }


def group_facts(group: RecordedGroup, recorded: RecordedStep) -> dict[str, Any]:
    """One group as the learner got it: `advantages` has one sign per member, `lag` is that of the oldest token."""
    trajectories = group.trajectories
    returns = {member: trajectory.total_reward for member, trajectory in trajectories.items()}
    oldest = min(trajectory.oldest_policy_version for trajectory in trajectories.values())
    return {
        "group_id": group.ticket.group_id,
        "task": group.ticket.task.task_id,
        "returns": list(returns.values()),
        "advantages": _signs(list(returns.values())),
        "lag": recorded.lag_of(oldest),
        "best": max(returns, key=returns.__getitem__),
        "worst": min(returns, key=returns.__getitem__),
    }


def _signs(returns: list[float]) -> str:
    if len(returns) < 2:
        return "?"  # the payloads of its siblings are unreadable
    return "".join(
        "0" if abs(advantage) <= RETURN_RESOLUTION else "+" if advantage > 0 else "-"
        for advantage in centred_advantages(returns)
    )
