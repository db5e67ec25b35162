"""`slipstream data`: filter, mark, copy with errors and split recorded conversations, and print what was dropped.

    FILE.jsonl              the rows that are kept, in one shape
    FILE.held-out.jsonl     those of the tasks that are held out, with --held-out
    FILE.quarantine.jsonl   rows that cannot be read, with file, line and reason, if there are any
    FILE.marks.jsonl        the answers of a judge, with --judge; it stays, so that nothing is asked twice

All others appear at the end, or none. One row is in memory at a time; with a judge, also a mark of each. A call that
was killed, or failed, is continued by the same command: see `data_files`.
"""

import dataclasses
import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import check_apart
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
from slipstream.tools.data.data_counts import Counts, Source, count, listed
from slipstream.tools.data.data_files import DataFiles, SourceState
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.data.fit_rows import described, held_out_place
from slipstream.tools.data.judge_rows import RowJudge, judged, read_judge
from slipstream.tools.data.row_noise import noisy
from slipstream.tools.data.row_sieve import Sieve
from slipstream.tools.terminal.options import as_arguments
from slipstream.tools.terminal.output_lines import json_line

PROGRESS_S = 5.0
SAVE_S = 2.0
MAX_SHOWN = 2000  # characters of a row in quarantine
KEPT_COLUMNS = ("return", "score", "success", "group_id", "member", "run_id", "id")  # beside those of `_row`
KEPT_TYPES = (str, int, float)


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
    seed = config.run.seed
    judge = read_judge(Path(options.judge)) if options.judge else None
    started = time.monotonic()
    try:
        with DataFiles(path) as files:
            files.check_free(force=force)
            check_apart(files.outputs, [*options.data, options.judge])
            saved = files.continued(*_settings(options, judge, seed), [SourceState.of(source) for source in sources])
            num_before = saved.counts.num_rows
            if num_before:
                print(f"{files.state}: continuing after {num_before} rows", file=sys.stderr, flush=True)
            call = _Call(options=options, files=files, counts=saved.counts, judge=judge, seed=seed)
            if not saved.is_whole:
                call.write(sources)
            files.finish()
    except OSError as error:
        raise ConfigError(
            f"cannot read the files or write {path}: {error}; free space, or choose another; the same command continues"
        ) from error
    except KeyboardInterrupt:
        print(f"{path} is unfinished; the same command continues", file=sys.stderr)
        raise
    _report(path, files, saved.counts, rate=(saved.counts.num_rows - num_before) / (time.monotonic() - started))
    return 0


def _report(path: Path, files: DataFiles, counts: Counts, *, rate: float) -> None:
    held_out = f", {counts.num_held_out} in {files.held_out.name}" if counts.num_held_out else ""
    copies = f", and {counts.num_copies} copies with errors" if counts.num_copies else ""
    print(
        f"{path}: {counts.num_trained} of {counts.num_rows} rows are kept{held_out}{copies}, "
        f"{sum(counts.dropped.values())} dropped, {sum(counts.malformed.values())} cannot be read; {rate:.0f} rows/s"
    )
    for what, found in (
        ("dropped", counts.dropped),
        (f"cannot be read, see {files.quarantine.name}", counts.malformed),
        ("fields that are not read", counts.unread),
    ):
        if found:
            print(f"{what}: {printable(listed(found))}")


def _settings(options: DataOptions, judge: RowJudge | None, seed: int) -> tuple[list[str], list[str]]:
    """The settings by which rows are read, and those by which rows that wait for a judge are kept."""
    early = as_arguments(dataclasses.replace(options, data=(), judge="", min_mark=0.0))
    late = []
    if options.noise:
        early.append(f"run.seed={seed}")
    if judge:
        early.append(f"a judge shown {', '.join(judge.columns) or 'no columns'}")
        digest = hashlib.sha256(judge.settings.encode()).hexdigest()
        late += [f"judge {digest[:16]}", f"--min-mark={options.min_mark}"]
    return early, late


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call of `slipstream data`, or what continues one."""

    options: DataOptions
    files: DataFiles
    counts: Counts
    judge: RowJudge | None
    seed: int

    def write(self, sources: Sequence[Path]) -> None:
        """Read all rows, let the judge answer, and save the result as a whole. Raises ConfigError."""
        try:
            self._sift(sources)
        except ConfigError:  # a file that cannot be read will be another when it can
            self.files.discard()
            raise
        if self.judge and (waiting := self.files.waiting_rows()):
            self._keep_waiting(waiting, self.judge)
        counts = self.counts
        if not counts.num_trained:
            self.files.discard()
            held_out = {"held out by --held-out": counts.num_held_out} if counts.num_held_out else {}
            why = listed(counts.dropped | held_out) or "no rows"
            why += f", {sum(counts.malformed.values())} cannot be read"
            why += f": {counts.first_fault}" if counts.first_fault else ""
            raise ConfigError(f"nothing is written to {self.files.kept}: {why}")
        _, late = _settings(self.options, self.judge, self.seed)
        self.files.save(late=late, is_whole=True)

    def _sift(self, sources: Sequence[Path]) -> None:
        """Read the rows that were not read before, write each to where it belongs, and save that now and then."""
        sieve, counts = Sieve(self.options, self.files), self.counts
        shown_at = saved_at = time.monotonic()
        for place, path in enumerate(sources):
            if place < len(counts.sources) - 1:
                continue
            if place == len(counts.sources):
                counts.sources.append(Source(path=str(path)))
            source = counts.sources[place]
            for line in read_lines(path, skip=source.num_rows):
                source.num_rows += 1
                try:
                    reason = self._place(line, source, sieve)
                except BadRow as error:
                    _quarantine(line, path, str(error), self.files, counts)
                else:
                    if reason:
                        count(counts.dropped, reason)
                if time.monotonic() - saved_at > SAVE_S:
                    self.files.save()
                    saved_at = time.monotonic()
                if time.monotonic() - shown_at > PROGRESS_S:
                    shown_at = time.monotonic()
                    print(
                        f"{path}: {source.num_rows} rows are read, {source.num_kept} kept", file=sys.stderr, flush=True
                    )
        self.files.save()

    def _place(self, line: Line, source: Source, sieve: Sieve) -> str | None:
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
        row = _row(conversation, line.row, source=f"{Path(source.path).name}:{line.number}")
        columns = self.judge.columns if self.judge else []
        if missing := [name for name in columns if line.row.get(name) is None]:
            raise BadRow(f"no column {', '.join(missing)} to show to the judge")
        shown = {name: line.row[name] for name in columns}
        _check_json({name: row[name] for name in KEPT_COLUMNS if name in row} | shown)
        if reason := sieve.reason_to_drop(conversation, line.row):
            return reason
        for name in conversation.unread:
            count(self.counts.unread, name)
        if self.judge is None:
            self._keep(row, source)
            return None
        self.files.write(self.files.waiting, {**row, "columns": shown, "from": len(self.counts.sources) - 1})
        return None

    def _keep_waiting(self, waiting: Path, judge: RowJudge) -> None:
        """Let the judge mark the rows that wait, and keep those with a mark that is high enough."""
        counts, name = self.counts, judge.part.name
        marks = judged(waiting, judge, self.files.marks)
        with waiting.open() as rows:
            for number, text in enumerate(rows):
                row = json.loads(text)
                source = counts.sources[row.pop("from")]
                del row["columns"]
                if marks[number][name] < self.options.min_mark:
                    count(counts.dropped, "mark below --min-mark")
                else:
                    self._keep(row | {"marks": marks[number]}, source)

    def _keep(self, row: Row, source: Source) -> None:
        counts, messages = self.counts, row["messages"]
        is_held_out = held_out_place(row["task"]) < self.options.held_out
        self.files.write(self.files.held_out if is_held_out else self.files.kept, row)
        source.num_kept += 1
        counts.num_held_out += is_held_out
        counts.num_trained += not is_held_out
        if is_held_out or not self.options.noise:
            return
        copy = noisy(messages, share=self.options.noise, dice=random.Random(f"{self.seed}/{row['source']}"))
        if copy is not None:
            counts.num_copies += 1
            self.files.write(self.files.kept, {**row, "messages": copy, "perturbed": "noise"})


def _quarantine(line: Line, path: Path, why: str, files: DataFiles, counts: Counts) -> None:
    why = why.encode(errors="replace").decode()  # a row may name half a surrogate pair, which no file can hold
    count(counts.malformed, why.partition(", got")[0])
    shown = line.text or repr(line.row)[:MAX_SHOWN]
    files.write(files.quarantine, {"file": str(path), "line": line.number, "why": why, "row": shown})
    counts.first_fault = counts.first_fault or f"{path}, line {line.number}: {why}"


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
    kept = {name: row[name] for name in KEPT_COLUMNS if isinstance(row.get(name), KEPT_TYPES)}
    if (label := label_of(row)) is not None:
        kept["label"] = bool(label)
    if row.get("turn_labels") is not None:
        labels = dict(conversation.labels)
        kept["turn_labels"] = [
            labels.get(index) for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
    task = prompt_task(conversation) if row.get("task") is None else str(row["task"])
    return {"messages": messages, "task": task, **kept, "source": source}
