"""Keeps which of two sibling episodes people prefer, in a file of the run that `slipstream fit dpo` and `reward` read.

Each row is a pair: `chosen`, `rejected` and, as `member`, the numbers of both in their group.
"""

from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.output import held
from slipstream.common.process.wire import MALFORMED
from slipstream.common.rows.row_source import BadRow, Row, whole_rows
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.tools.data.row_files import write_rows


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person says about two members of a group."""

    step: int
    group_id: int
    better: int
    worse: int
    undo: bool = False  # whether neither is better any more


def read_mark(body: bytes) -> Mark:
    """The mark that a browser sent. Raises ValueError."""
    try:
        mark = msgspec.json.decode(body, type=Mark)
    except MALFORMED as error:
        raise ValueError(f"malformed mark: {error}; send step, group_id, better and worse as JSON") from error
    if mark.better == mark.worse:
        raise ValueError(f"a mark must name two members, got {mark.better} twice; name another as `worse`")
    return mark


def marked_rows(path: Path) -> list[Row]:
    """The rows of the file. Raises NotRecorded if one is damaged."""
    try:
        return [row for _, row in whole_rows(path)] if path.exists() else []
    except BadRow as error:
        raise NotRecorded(f"{path} is damaged: {error}; correct that line or remove it") from error


def keep_mark(path: Path, mark: Mark, sides: dict[str, Any]) -> None:
    """Replace the file by one in which the last mark of a pair counts. Raises ConfigError if another process writes."""
    with held(path):
        pair = [(mark.group_id, [mark.better, mark.worse]), (mark.group_id, [mark.worse, mark.better])]
        rows = [row for row in marked_rows(path) if (row.get("group_id"), row.get("member")) not in pair]
        write_rows(path, rows if mark.undo else [*rows, sides])
