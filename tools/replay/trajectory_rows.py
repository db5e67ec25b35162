"""`slipstream replay export`: write trajectories as rows of JSON or parquet that TRL can read.

A row has TRL's conversational columns (https://huggingface.co/docs/trl/dataset_formats): `messages`, a list of role and
content, and `tools`, which is null because no environment here declares tools. `fidelity` says how exactly the messages
give the tokens. If they cannot be recovered from the tokens, `messages` is null and `segments` has the text.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.transcript import Fidelity, Transcriber
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.tools.data.row_files import rows_to, write_rows
from slipstream.tools.replay.run_records import RunRecords

UNREADABLE = "unreadable"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which trajectories to export: all, those of groups in Redis in one state, or those of steps in the archive."""

    state: str | None  # of groups in Redis
    steps: tuple[int, int] | None  # first and last, of the archive
    min_return: float | None  # None takes every return


def export(config: Config, *, path: Path, selection: Selection, stream: str, force: bool) -> int:
    """Write one row per trajectory to `path`, completely or not at all. Raises ConfigError, NotRecorded."""
    counts: Counter[str] = Counter()
    with rows_to(path, force=force):
        rows = _rows(RunRecords(config, stream=stream), selection, counts)
        first = next(rows, None)
        if first is None:
            raise NotRecorded(
                f"nothing is written to {path}: no trajectory matches; change --state, --steps or --min-reward"
            )
        write_rows(path, itertools.chain([first], rows))
    num_rows = counts.total() - counts[UNREADABLE]
    exact = counts[Fidelity.TOKENS.value]
    print(f"{path}: {num_rows} trajectories; the messages of {exact} give exactly the trained tokens")
    if counts[Fidelity.NONE.value]:
        print(
            f"{counts[Fidelity.NONE.value]} have segments and no messages, which could not be recovered from the tokens"
        )
    if counts[UNREADABLE]:
        print(f"{counts[UNREADABLE]} unreadable payloads are left out; see `slipstream replay show GROUP`")
    return 0


def row_of(trajectory: Trajectory, transcriber: Transcriber, *, state: str, step: int | None) -> Row:
    """The row of one trajectory of a group that is in `state` and was last claimed for `step`, with every column."""
    read = transcriber.read(trajectory)
    unread = read.fidelity is Fidelity.NONE
    return {
        "messages": None if unread else [msgspec.structs.asdict(message) for message in read.messages],
        "tools": None,
        "rewards": [
            {"turn": index, "name": name, "value": value}
            for index, turn in enumerate(trajectory.turns)
            for name, value in turn.rewards.items()
        ],
        "state_keys": [turn.state_key for turn in trajectory.turns],
        "return": trajectory.total_reward,
        "score": trajectory.score,
        "success": trajectory.success,
        "fidelity": read.fidelity.value,
        "segments": _segments(transcriber, trajectory) if unread else None,
        "run_id": trajectory.run_id,
        "task": trajectory.task.task_id,
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "attempt": trajectory.attempt,
        "actor": trajectory.actor,
        "state": state,
        "step": step,
        "policy_versions": sorted({span.policy_version for span in trajectory.version_spans}),
        "num_turns": len(trajectory.turns),
        "num_tokens": trajectory.num_tokens,
        "num_branches": len(trajectory.branch_starts),
        "stop_reason": trajectory.stop_reason.value,
    }


def _rows(records: RunRecords, selection: Selection, counts: Counter[str]) -> Iterator[Row]:
    """Yield the rows one by one, with one group in memory at a time; count them by fidelity."""
    if selection.steps:
        groups = records.archived(*selection.steps)
    elif selection.state:
        groups = records.held([selection.state])
    else:
        groups = records.everything()
    for group in groups:
        counts[UNREADABLE] += len(group.unreadable)
        for trajectory in group.trajectories.values():
            if selection.min_return is None or trajectory.total_reward >= selection.min_return:
                row = row_of(trajectory, records.transcriber, state=group.state, step=group.step)
                counts[row["fidelity"]] += 1
                yield row


def _segments(transcriber: Transcriber, trajectory: Trajectory) -> list[dict[str, str]]:
    return [
        {"kind": kind, "text": text}
        for turn in transcriber.turns(trajectory)
        for kind, text in (("prompt", turn.prompt), ("action", turn.action))
    ]
