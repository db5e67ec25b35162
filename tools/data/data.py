"""`slipstream data`: filter, mark, copy with errors and split recorded conversations, and print what was dropped.

    FILE.jsonl              the rows that are kept, in one shape
    FILE.held-out.jsonl     those of the tasks that are held out, with --held-out
    FILE.quarantine.jsonl   rows that cannot be read, with file, line and reason, if there are any
    FILE.marks.jsonl        the answers of a judge, with --judge; it stays, so that nothing is asked twice

All others appear at the end, or none. One row is in memory at a time; with a judge, also a mark of each. The same
command asks a judge nothing twice.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.printable import printable
from slipstream.common.rows.row_source import BadRow, Line, Row, is_hub, read_lines
from slipstream.tools.data.conversation_rows import (
    Conversation,
    conversation_of,
    is_pair,
    label_of,
    labelled,
    prompt_task,
    reason_to_leave_out,
)
from slipstream.tools.data.data_files import DataFiles
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.data.fit_rows import described, held_out_place
from slipstream.tools.data.judge_rows import RowJudge, judged, read_judge
from slipstream.tools.data.row_noise import noisy
from slipstream.tools.data.row_sieve import Sieve
from slipstream.tools.terminal.output_lines import json_line

PROGRESS_S = 5.0
MAX_SHOWN = 2000  # characters of a row in quarantine
KEPT_COLUMNS = ("return", "score", "success", "group_id", "member", "run_id", "id")  # beside those of `_row`


def data(config: Config, *, path: Path, force: bool, options: DataOptions) -> int:
    """Write the rows that are kept; return 0. Raises ConfigError."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"the name of the file to write must end in .jsonl, got '{path}'; choose another")
    sources = [Path(name) for name in options.data]
    for named in (path, *sources):
        try:
            str(named).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the name {str(named)!r} is not UTF-8; rename the file") from None
    if not sources:
        raise ConfigError("`--data` must name one file of conversations or several; see docs/data.md")
    for source in sources:
        if not is_hub(source) and not source.is_file():
            raise ConfigError(f"`--data` {source} is not a file; name .jsonl, .json or .parquet files of conversations")
    judge = read_judge(Path(options.judge)) if options.judge else None
    files, counts, started = DataFiles(path), _Counts(), time.monotonic()
    try:
        with (
            files.written(force=force, inputs=[*options.data, options.judge]),
            tempfile.TemporaryFile(dir=path.parent) as waiting,
        ):
            _Call(
                options=options, files=files, counts=counts, judge=judge, waiting=waiting, seed=config.run.seed
            ).write(sources)
    except OSError as error:
        raise ConfigError(f"cannot read the files or write {path}: {error}; free space, or choose another") from error
    _report(path, files, counts, rate=counts.num_rows / (time.monotonic() - started))
    return 0


@dataclass(kw_only=True, slots=True)
class _Counts:
    """What has become of the rows so far."""

    num_rows: int = 0
    num_trained: int = 0
    num_held_out: int = 0
    num_copies: int = 0  # rows with typing errors
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    malformed: Counter[str] = field(default_factory=Counter)  # by the kind of fault
    first_fault: str = ""
    unread: Counter[str] = field(default_factory=Counter)  # fields that no reader knows, in rows that passed


def _report(path: Path, files: DataFiles, counts: _Counts, *, rate: float) -> None:
    held_out = f", {counts.num_held_out} in {files.held_out.name}" if counts.num_held_out else ""
    copies = f", and {counts.num_copies} copies with errors" if counts.num_copies else ""
    print(
        f"{path}: {counts.num_trained} of {counts.num_rows} rows are kept{held_out}{copies}, "
        f"{counts.dropped.total()} dropped, {counts.malformed.total()} cannot be read; {rate:.0f} rows/s"
    )
    for what, found in (
        ("dropped", counts.dropped),
        (f"cannot be read, see {files.quarantine.name}", counts.malformed),
        ("fields that are not read", counts.unread),
    ):
        if found:
            print(f"{what}: {printable(_listed(found))}")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.most_common())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    options: DataOptions
    files: DataFiles
    counts: _Counts
    judge: RowJudge | None
    waiting: BinaryIO  # rows that wait for the judge
    seed: int

    def write(self, sources: Sequence[Path]) -> None:
        """Read all rows, and let the judge answer. Raises ConfigError if no row is kept."""
        self._sift(sources)
        if self.judge:
            self._keep_waiting(self.judge)
        counts = self.counts
        if not counts.num_trained:
            held_out = Counter({"held out by --held-out": counts.num_held_out})
            why = _listed(counts.dropped + held_out) or "no rows"
            why += f", {counts.malformed.total()} cannot be read"
            why += f": {counts.first_fault}" if counts.first_fault else ""
            raise ConfigError(f"nothing is written to {self.files.kept}: {why}")

    def _sift(self, sources: Sequence[Path]) -> None:
        """Read all rows, and write each to where it belongs."""
        sieve, counts, shown_at = Sieve(self.options), self.counts, time.monotonic()
        for path in sources:
            for line in read_lines(path):
                counts.num_rows += 1
                try:
                    if reason := self._place(line, path, sieve):
                        counts.dropped[reason] += 1
                except BadRow as error:
                    self._quarantine(line, path, str(error))
                if time.monotonic() - shown_at > PROGRESS_S:
                    shown_at = time.monotonic()
                    print(f"{path}: {counts.num_rows} rows are read", file=sys.stderr, flush=True)

    def _place(self, line: Line, path: Path, sieve: Sieve) -> str | None:
        """Write a row if it is kept, or lay it aside for the judge; else return the reason. Raises BadRow."""
        if line.fault:
            raise BadRow(line.fault)
        if reason := reason_to_leave_out(line.row, labels=True):
            return reason
        if is_pair(line.row):
            raise BadRow("a pair (`chosen`), which `slipstream fit dpo` and `reward` read as it is")
        conversation = conversation_of(line.row)
        if line.row.get("turn_labels") is not None:
            conversation = labelled(line.row, conversation)
        conversation = described(conversation)
        row = _row(conversation, line.row, source=f"{path.name}:{line.number}")
        columns = sorted(self.judge.judge.columns) if self.judge else []  # that it sees beside the conversation
        if missing := [name for name in columns if line.row.get(name) is None]:
            raise BadRow(f"no column {', '.join(missing)} to show to the judge")
        shown = {name: line.row[name] for name in columns}
        _check_json({name: row[name] for name in KEPT_COLUMNS if name in row} | shown)
        if reason := sieve.reason_to_drop(conversation, line.row):
            return reason
        self.counts.unread.update(conversation.unread)
        if self.judge is None:
            self._keep(row)
        else:
            self.waiting.write(json_line({**row, "columns": shown}).encode() + b"\n")
        return None

    def _quarantine(self, line: Line, path: Path, why: str) -> None:
        why = why.encode(errors="replace").decode()  # a row may name half a surrogate pair, which no file can hold
        self.counts.malformed[why.partition(", got")[0]] += 1
        shown = line.text or repr(line.row)[:MAX_SHOWN]
        self.files.write(self.files.quarantine, {"file": str(path), "line": line.number, "why": why, "row": shown})
        self.counts.first_fault = self.counts.first_fault or f"{path}, line {line.number}: {why}"

    def _keep_waiting(self, judge: RowJudge) -> None:
        """Let the judge mark the rows that wait, and keep those with a mark that is high enough."""
        marks = judged(self.waiting, judge, self.files.marks)
        self.waiting.seek(0)
        for text, mark in zip(self.waiting, marks, strict=True):
            row = json.loads(text)
            del row["columns"]
            if mark[judge.name] < self.options.min_mark:
                self.counts.dropped["mark below --min-mark"] += 1
            else:
                self._keep(row | {"marks": mark})

    def _keep(self, row: Row) -> None:
        counts, messages = self.counts, row["messages"]
        is_held_out = held_out_place(row["task"]) < self.options.held_out
        self.files.write(self.files.held_out if is_held_out else self.files.kept, row)
        counts.num_held_out += is_held_out
        counts.num_trained += not is_held_out
        if is_held_out or not self.options.noise:
            return
        copy = noisy(messages, share=self.options.noise, dice=random.Random(f"{self.seed}/{row['source']}"))
        if copy is not None:
            counts.num_copies += 1
            self.files.write(self.files.kept, {**row, "messages": copy, "perturbed": "noise"})


def _check_json(columns: Row) -> None:
    """Raise BadRow for a value that JSON lacks, such as NaN or a date of a parquet file."""
    for name, value in columns.items():
        try:
            json_line({name: value})
        except (TypeError, ValueError):
            raise BadRow(f"`{name}` must be a value of JSON, got {value!r:.80}") from None


def _row(conversation: Conversation, row: Row, *, source: str) -> Row:
    """The row in one shape. Rows without a task get one from their prompt: the same prompt is the same task."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(conversation.messages):
        spared = message.role == "assistant" and not conversation.is_learnt(index)
        messages.append({"role": message.role, "content": message.content, **({"loss": False} if spared else {})})
    kept = {name: row[name] for name in KEPT_COLUMNS if isinstance(row.get(name), str | int | float)}
    if (label := label_of(row)) is not None:
        kept["label"] = bool(label)
    if row.get("turn_labels") is not None:
        labels = dict(conversation.labels)
        kept["turn_labels"] = [
            labels.get(index) for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
    task = prompt_task(conversation) if row.get("task") is None else str(row["task"])
    return {"messages": messages, "task": task, **kept, "source": source}
