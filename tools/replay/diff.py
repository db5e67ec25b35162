"""`slipstream replay diff`: show what one optimizer step was trained on, or compare two steps."""

import difflib
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.common.config.config import Config
from slipstream.common.process.printable import printable
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.transcript import Transcriber
from slipstream.learner.credit.grpo import RETURN_RESOLUTION, centred_advantages
from slipstream.tools.replay.run_records import RecordedGroup, RecordedStep, RunRecords
from slipstream.tools.terminal.output_lines import print_json, printable_lines
from slipstream.tools.terminal.table import print_rows, print_table

COLUMNS = ("group", "task", "returns by member", "advantages", "lag", "best", "worst")
STYLES = {"+": "green", "-": "red"}


def diff(config: Config, *, numbers: Sequence[int], diffs: int, as_json: bool) -> int:
    """Print a step in numbers, its groups, and the best against the worst actions of the `diffs` most unequal ones.

    Of two steps, print the numbers of both, and the tasks that both were trained on.
    """
    records = RunRecords(config, stream="train")
    step, *others = numbers
    recorded = records.step(step)
    if others:
        return _compare(recorded, records.step(others[0]), as_json=as_json)
    groups = [group_facts(group, recorded) for group in recorded.groups]
    groups.sort(key=lambda facts: min(facts["returns"]) - max(facts["returns"]))
    by_id = {group.ticket.group_id: group for group in recorded.groups}
    unequal = [facts for facts in groups if facts["best"] != facts["worst"]][:diffs]
    for facts in unequal:
        facts["diff"] = _siblings_diff(facts, by_id[facts["group_id"]], records.transcriber)
    if as_json:
        return print_json([step_facts(recorded), *groups])
    print_table(f"step {step}", {name: _shown(value) for name, value in step_facts(recorded).items()})
    print_rows(COLUMNS, [_row(facts) for facts in groups])
    for facts in unequal:
        _print_diff(facts)
    return 0


def _compare(first: RecordedStep, second: RecordedStep, *, as_json: bool) -> int:
    facts, other_facts, shared = step_facts(first), step_facts(second), _shared_tasks(first, second)
    if as_json:
        return print_json([facts, other_facts, *shared])
    print_rows(
        ("", f"step {first.step}", f"step {second.step}", "change"),
        [
            [name, _shown(value), _shown(other_facts[name]), _change(value, other_facts[name])]
            for name, value in facts.items()
            if name != "step"
        ],
    )
    print(f"{len(shared)} tasks are in both steps")
    for task in shared:
        print(f"  {printable(task['task'])}: mean return {task['mean_return']:.3f}, then {task['other_return']:.3f}")
    return 0


def step_facts(recorded: RecordedStep) -> dict[str, Any]:
    """One step in numbers. Shares are of turns, lengths in sampled tokens, log-probabilities means per token."""
    trajectories = [trajectory for group in recorded.groups for trajectory in group.trajectories.values()]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    groups = [group_facts(group, recorded) for group in recorded.groups]
    sampled = sum(turn.stop - turn.start for turn in turns)
    lags = [facts["lag"] for facts in groups if facts["lag"] is not None]
    return {
        "step": recorded.step,
        "policy_version": recorded.policy_version,
        "num_groups": len(groups),
        "num_trajectories": len(trajectories),
        "num_tasks": len({facts["task"] for facts in groups}),
        "trained_reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "trained_success": fmean(trajectory.success for trajectory in trajectories),
        "equal_groups": sum(set(facts["advantages"]) == {"0"} for facts in groups),
        "lag_mean": fmean(lags) if lags else None,
        "lag_max": max(lags, default=None),
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


def _siblings_diff(facts: dict[str, Any], group: RecordedGroup, transcriber: Transcriber) -> list[str]:
    """The lines of a unified diff from the actions of the worst sibling to those of the best."""
    worst, best = (_actions(group.trajectories[facts[which]], transcriber) for which in ("worst", "best"))
    return list(difflib.unified_diff(worst, best, "worst", "best", n=1, lineterm=""))[2:]


def _actions(trajectory: Trajectory, transcriber: Transcriber) -> list[str]:
    return [
        f"turn {index}: {line}"
        for index, text in enumerate(transcriber.turns(trajectory))
        for line in text.action.split("\n")
    ]


def _print_diff(facts: dict[str, Any]) -> None:
    worst, best = facts["worst"], facts["best"]
    page = Text(f"\ngroup {facts['group_id']}: from member {worst} (-) to member {best} (+)\n", style="bold")
    console = Console(highlight=False)
    for line in facts["diff"]:
        if not line.startswith("@@"):
            for piece in printable_lines(line, console, indent=2):
                page.append(f"  {piece}\n", style=STYLES.get(line[0], "dim"))
    if not facts["diff"]:
        page.append("  both took the same actions\n")
    console.print(page, soft_wrap=True, end="")


def _shared_tasks(first: RecordedStep, second: RecordedStep) -> list[dict[str, Any]]:
    returns, other_returns = _returns_by_task(first), _returns_by_task(second)
    return [
        {"task": task, "mean_return": fmean(returns[task]), "other_return": fmean(other_returns[task])}
        for task in sorted(returns.keys() & other_returns.keys())
    ]


def _returns_by_task(recorded: RecordedStep) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for group in recorded.groups:
        for trajectory in group.trajectories.values():
            found.setdefault(group.ticket.task.task_id, []).append(trajectory.total_reward)
    return found


def _row(facts: dict[str, Any]) -> list[str]:
    returns = " ".join(f"{value:.2f}" for value in facts["returns"])
    return [
        str(facts["group_id"]),
        facts["task"],
        returns,
        facts["advantages"],
        _shown(facts["lag"]),
        str(facts["best"]),
        str(facts["worst"]),
    ]


def _shown(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _change(value: float | None, other: float | None) -> str:
    return "" if value is None or other is None else f"{other - value:+.3f}"
