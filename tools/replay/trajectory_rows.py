"""`slipstream replay export`: write trajectories as rows of JSON or parquet that TRL can read.

A row has TRL's conversational columns (https://huggingface.co/docs/trl/dataset_formats): `messages`, a list of role and
content, and `tools`, which is null because no environment here declares tools. `fidelity` says how exactly the messages
give the tokens. If they cannot be recovered from the tokens, `messages` is null and `segments` has the text.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.rows.row_source import Row
from slipstream.common.text.transcript import Fidelity, Transcriber, TurnText
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.tools.data.row_files import rows_to, write_rows
from slipstream.tools.replay.run_records import RecordedGroup, RunRecords

UNREADABLE = "unreadable"


def export(
    config: Config,
    *,
    path: Path,
    state: str | None,
    steps: tuple[int, int] | None,
    min_reward: float | None,
    stream: str,
    force: bool,
) -> int:
    """Write one row per trajectory to `path`, completely or not at all. Raises ConfigError, NotRecorded.

    They are all, or those of groups in Redis in one state, or those of steps in the archive, from the first to the
    last of `steps`.
    """
    if state and steps:
        raise ConfigError(f"`--state` {state} is not possible with `--steps`: the archive has no states; leave one out")
    counts: Counter[str] = Counter()
    with rows_to(path, force=force):
        records = RunRecords(config, stream=stream)
        groups = records.archived(*steps) if steps else records.held([state]) if state else records.everything()
        rows = _rows(groups, records, counts, min_reward=min_reward)
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
        "segments": _segments(read.turns) if unread else None,
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


def _rows(
    groups: Iterable[RecordedGroup], records: RunRecords, counts: Counter[str], *, min_reward: float | None
) -> Iterator[Row]:
    """Yield the rows one by one, with one group in memory at a time; count them by fidelity."""
    for group in groups:
        counts[UNREADABLE] += len(group.unreadable)
        for trajectory in group.trajectories.values():
            if min_reward is None or trajectory.total_reward >= min_reward:
                row = row_of(trajectory, records.transcriber, state=group.state, step=group.step)
                counts[row["fidelity"]] += 1
                yield row


def _segments(turns: Iterable[TurnText]) -> list[dict[str, str]]:
    return [
        {"kind": kind, "text": text}
        for turn in turns
        for kind, text in (("prompt", turn.prompt), ("action", turn.action))
    ]
