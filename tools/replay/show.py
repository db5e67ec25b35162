"""`slipstream replay show`: show the members of a group, or one trajectory turn by turn."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.printable import printable
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.transcript import TurnText
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.tools.replay.run_records import RecordedGroup, RunRecords
from slipstream.tools.replay.trajectory_page import print_page
from slipstream.tools.terminal.output_lines import print_json
from slipstream.tools.terminal.table import print_rows

COLUMNS = ("member", "return", "success", "turns", "tokens", "versions", "stop reason", "actor")


def show(config: Config, *, numbers: Sequence[int], stream: str, as_json: bool) -> int:
    """Print the members of a group, or everything that is recorded of one member: `numbers` are those of both."""
    records = RunRecords(config, stream=stream)
    group_id, *members = numbers
    group = records.group(group_id)
    if not members:
        return _show_members(group, as_json=as_json)
    [member] = members
    if member not in group.trajectories:
        readable = ", ".join(map(str, group.trajectories)) or "none"
        why = group.unreadable.get(member, "it is not stored")
        raise NotRecorded(
            f"member {member} of group {group_id} cannot be shown: {printable(why)}; readable members: {readable}"
        )
    trajectory = group.trajectories[member]
    facts = _where(group) | trajectory_facts(trajectory, records.transcriber.turns(trajectory))
    if as_json:
        return print_json([facts])
    print_page(facts)
    return 0


def trajectory_facts(trajectory: Trajectory, texts: list[TurnText]) -> dict[str, Any]:
    """Everything that is recorded of one trajectory. Log-probabilities are the behaviour policy's, in nats."""
    logprobs = trajectory.behaviour_logprob_array()
    turns = []
    for turn, text in zip(trajectory.turns, texts, strict=True):
        spans = [span for span in trajectory.version_spans if span.start < turn.stop and span.stop > turn.start]
        recorded = msgspec.structs.asdict(turn)
        start, stop = recorded.pop("start"), recorded.pop("stop")
        turns.append(
            {
                **asdict(text),  # prompt, action, new_branch
                **recorded,
                "num_tokens": stop - start,
                "policy_versions": sorted({span.policy_version for span in spans}),
                "logprob_mean": float(logprobs[start:stop].mean()),
                "logprob_min": float(logprobs[start:stop].min()),
            }
        )
    return member_facts(trajectory) | {
        "attempt": trajectory.attempt,
        "score": trajectory.score,
        "part_values": trajectory.part_values,
        "scoring_s": trajectory.scoring_s,
        "outcome": trajectory.outcome.value,
        "num_branches": len(trajectory.branch_starts),
        "sampling": msgspec.structs.asdict(trajectory.sampling),
        "kept_tokens_mean": None if trajectory.kept is None else trajectory.kept.mean_size,
        "started_at_s": trajectory.started_at_s,
        "duration_s": trajectory.duration_s,
        **msgspec.structs.asdict(trajectory.provenance),  # host, instance_kind, price_per_hour
        "turns": turns,
    }


def member_facts(trajectory: Trajectory) -> dict[str, Any]:
    """The facts of one trajectory that fit on one line."""
    return {
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "task": trajectory.task.task_id,
        "return": trajectory.total_reward,
        "success": trajectory.success,
        "num_turns": len(trajectory.turns),
        "num_tokens": trajectory.num_tokens,
        "fork": trajectory.fork and msgspec.to_builtins(trajectory.fork),
        "oldest_policy_version": trajectory.oldest_policy_version,
        "newest_policy_version": trajectory.newest_policy_version,
        "stop_reason": trajectory.stop_reason.value,
        "actor": trajectory.actor,
    }


def _show_members(group: RecordedGroup, *, as_json: bool) -> int:
    members = [_where(group) | member_facts(trajectory) for trajectory in group.trajectories.values()]
    if as_json:
        return print_json(members)
    claimed = "" if group.step is None else f", claimed for step {group.step}"
    print(f"group {group.ticket.group_id}: {printable(group.ticket.task.task_id)}, {group.state}{claimed}")
    print_rows(COLUMNS, [_row(facts) for facts in members])
    for member, why in group.unreadable.items():
        print(f"member {member} cannot be read: {printable(why)}")
    return 0


def _row(facts: dict[str, Any]) -> list[str]:
    return [
        str(facts["member"]),
        f"{facts['return']:.3f}",
        "yes" if facts["success"] else "no",
        str(facts["num_turns"]),
        str(facts["num_tokens"]),
        f"{facts['oldest_policy_version']} to {facts['newest_policy_version']}",
        facts["stop_reason"],
        facts["actor"],
    ]


def _where(group: RecordedGroup) -> dict[str, Any]:
    return {"state": group.state, "step": group.step}
