"""`slipstream data`: filter, mark and split recorded conversations, and report why rows were dropped.

    FILE.jsonl              the rows that are kept, in one shape
    FILE.held-out.jsonl     those of the tasks that are held out, with --held-out
    FILE.quarantine.jsonl   rows that cannot be read, with file, line and reason, if there are any
    FILE.md                 the data card
    FILE.marks.jsonl        the answers of a judge, with --judge; it stays, so that nothing is asked twice

All others appear at the end, or none. One row is in memory at a time; with a judge, also a mark of each.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import xxhash

from common.action_format import action_format
from common.config import Config
from common.config_error import ConfigError
from common.run_dir import write_whole
from tools.conversation_rows import BadRow, Conversation, Line, Row, conversation_of, read_lines
from tools.data_card import Counts, Source, card
from tools.data_options import DataOptions
from tools.fit_rows import UNREAD, held_out_place, return_of
from tools.judge_rows import RowJudge, agreement, judged, read_judge
from tools.near_duplicates import NearDuplicates, shingle_hashes
from tools.printable import json_line
from tools.row_files import check_free

PROGRESS_S = 5.0
NUM_FAULTS = 10  # shown on the card
MAX_SHOWN = 2000  # characters of a row in quarantine
KEPT_COLUMNS = ("return", "score", "success", "group_id", "member", "run_id", "id")  # beside those of `_row`
KEPT_TYPES = (str, int, float)


def data(_config: Config, *, path: Path, force: bool, options: DataOptions) -> int:
    """Write the rows that are kept, and the data card; return 0. Raises ConfigError."""
    check_free(path, force=force)
    if path.suffix != ".jsonl":
        raise ConfigError(f"the file name must end in .jsonl, got {path}")
    sources = [Path(name) for name in options.data]
    if not sources:
        raise ConfigError("`--data` must name one file of conversations or several; see docs/data.md")
    for source in sources:
        if not source.is_file():
            raise ConfigError(f"`--data` {source} is not a file; name .jsonl or .parquet files of conversations")
    judge = read_judge(Path(options.judge)) if options.judge else None
    started = time.monotonic()
    try:
        with _Files(path) as files:
            counts = _sift(sources, options, files, judge)
            if judge and files.is_waiting:
                _keep_by_marks(judge, options, files, counts)
            if not counts.num_trained:
                why = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.items()) or "no rows"
                raise ConfigError(f"nothing is written to {path}: {why}, {counts.num_malformed} cannot be read")
            files.finish(card(path.name, counts, options, digests=files.digests()))
    except OSError as error:
        raise ConfigError(f"cannot read the files or write {path}: {error}; free space, or choose another") from error
    seconds = time.monotonic() - started
    held_out = f", {counts.num_held_out} in {files.held_out.name}" if counts.num_held_out else ""
    print(
        f"{path}: {counts.num_trained} of {counts.num_rows} rows are kept{held_out}, {counts.dropped.total()} dropped, "
        f"{counts.num_malformed} cannot be read; {counts.num_rows / max(seconds, 1e-9):.0f} rows/s; see {files.card}"
    )
    return 0


class _Files:
    """The files of a result, written beside their names until `finish`. Without it nothing of them stays."""

    def __init__(self, path: Path) -> None:
        self.kept = path
        self.held_out = path.with_suffix(".held-out.jsonl")
        self.quarantine = path.with_suffix(".quarantine.jsonl")
        self.card = path.with_suffix(".md")
        self.journal = path.with_suffix(".marks.jsonl")
        self.waiting = path.with_suffix(".waiting.jsonl")  # for a judge; it never gets this name
        self._opened: dict[Path, TextIO] = {}
        self._digests: dict[Path, Any] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for path, file in self._opened.items():
            file.close()
            _half(path).unlink(missing_ok=True)

    def write(self, path: Path, record: dict[str, Any]) -> None:
        if path not in self._opened:
            self._opened[path], self._digests[path] = _half(path).open("w"), hashlib.sha256()
        line = json_line(record) + "\n"
        self._opened[path].write(line)
        self._digests[path].update(line.encode())

    @property
    def is_waiting(self) -> bool:
        """Whether rows wait for a judge."""
        return self.waiting in self._opened

    def waiting_rows(self) -> Path:
        """The file with the rows that wait for a judge, all written."""
        self._opened[self.waiting].flush()
        return _half(self.waiting)

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file of the result, by its name."""
        return {path.name: digest.hexdigest() for path, digest in self._digests.items() if path != self.waiting}

    def finish(self, text: str) -> None:
        """Give the files their names, and remove what an earlier call left under names that are not used now."""
        for path in (self.held_out, self.quarantine, self.kept):
            if path in self._opened:
                self._opened[path].close()
                _half(path).replace(path)
            else:
                path.unlink(missing_ok=True)
        write_whole(self.card, text)


def _half(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _sift(sources: list[Path], options: DataOptions, files: _Files, judge: RowJudge | None) -> Counts:
    """Read all rows once, and write each to where it belongs."""
    counts, sieve, shown_at = Counts(), _Sieve(options), time.monotonic()
    for path in sources:
        source = Source(path=path)
        counts.sources.append(source)
        for line in read_lines(path):
            source.num_rows += 1
            try:
                reason = _place(line, source, options, sieve, files, counts, judge)
            except BadRow as error:
                _quarantine(line, path, str(error), files, counts)
            else:
                if reason:
                    counts.dropped[reason] += 1
            if time.monotonic() - shown_at > PROGRESS_S:
                shown_at = time.monotonic()
                print(f"{path}: {source.num_rows} rows are read, {source.num_kept} kept", file=sys.stderr, flush=True)
    return counts


def _place(
    line: Line,
    source: Source,
    options: DataOptions,
    sieve: "_Sieve",
    files: _Files,
    counts: Counts,
    judge: RowJudge | None,
) -> str | None:
    """Write a row if it is kept, or lay it aside for the judge; else return the reason. Raises BadRow."""
    if line.fault:
        raise BadRow(line.fault)
    if line.row.get("messages", ()) is None:
        return UNREAD
    if "chosen" in line.row:
        raise BadRow("a pair (`chosen`), which `slipstream dpo` and `reward` read as it is")
    conversation = conversation_of(line.row)
    if reason := sieve.reason_to_drop(conversation, line.row):
        return reason
    row = _row(conversation, line.row, source=f"{source.path.name}:{line.number}")
    if judge is None:
        _keep(row, source, options, files, counts)
        return None
    if missing := [name for name in judge.columns if name not in line.row]:
        raise BadRow(f"no column {', '.join(missing)} to show to the judge")
    shown = {name: line.row[name] for name in judge.columns}
    files.write(files.waiting, {**row, "columns": shown, "from": counts.sources.index(source)})
    return None


def _keep_by_marks(judge: RowJudge, options: DataOptions, files: _Files, counts: Counts) -> None:
    """Let the judge mark the rows that wait, and keep those with a mark that is high enough."""
    waiting, name = files.waiting_rows(), judge.part.name
    marks = judged(waiting, judge, files.journal)
    successes: list[bool | None] = []
    with waiting.open() as rows:
        for text, mark in zip(rows, marks, strict=True):
            row = json.loads(text)
            source = counts.sources[row.pop("from")]
            del row["columns"]
            success = row.get("success")
            successes.append(success if isinstance(success, bool) else None)
            if mark[name] < options.min_mark:
                counts.dropped["mark below --min-mark"] += 1
            else:
                _keep({**row, "marks": mark}, source, options, files, counts)
    counts.marks = agreement(marks, successes, name=name)


def _keep(row: Row, source: Source, options: DataOptions, files: _Files, counts: Counts) -> None:
    is_held_out = held_out_place(row["task"]) < options.held_out
    files.write(files.held_out if is_held_out else files.kept, row)
    source.num_kept += 1
    counts.num_held_out += is_held_out
    counts.num_trained += not is_held_out
    messages = row["messages"]
    counts.replies[sum(message["role"] == "assistant" for message in messages).bit_length()] += 1
    counts.chars[sum(len(message["content"]) for message in messages).bit_length()] += 1


def _quarantine(line: Line, path: Path, why: str, files: _Files, counts: Counts) -> None:
    counts.malformed[why.partition(", got")[0]] += 1
    shown = line.text or repr(line.row)[:MAX_SHOWN]
    files.write(files.quarantine, {"file": str(path), "line": line.number, "why": why, "row": shown})
    if len(counts.faults) < NUM_FAULTS:
        counts.faults.append(f"{path}, line {line.number}: {why}")


def num_replies(conversation: Conversation) -> int:
    return sum(message.role == "assistant" for message in conversation.messages)


def num_chars(conversation: Conversation) -> int:
    return sum(len(message.content) for message in conversation.messages)


def _row(conversation: Conversation, row: Row, *, source: str) -> Row:
    """The row in one shape. Rows without a task get one from their prompt: the same prompt is the same task."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(conversation.messages):
        spared = message.role == "assistant" and not conversation.is_learnt(index)
        messages.append({"role": message.role, "content": message.content, **({"loss": False} if spared else {})})
    kept = {name: row[name] for name in KEPT_COLUMNS if isinstance(row.get(name), KEPT_TYPES)}
    return {"messages": messages, "task": str(row["task"]) if "task" in row else _prompt_task(conversation), **kept} | {
        "source": source
    }


def _prompt_task(conversation: Conversation) -> str:
    """A name for the messages before the first reply."""
    prompt = xxhash.xxh3_64()
    for message in conversation.messages:
        if message.role == "assistant":
            break
        prompt.update(f"{message.role}\0{message.content}\0".encode(errors="replace"))
    return f"prompt/{prompt.hexdigest()}"


class _Sieve:
    """Decides which conversations are kept. It remembers a hash of each, and what finds near-duplicates."""

    def __init__(self, options: DataOptions) -> None:
        self._options = options
        self._format = action_format(options.action_format) if options.action_format else None
        self._seen = set[int]()
        self._near = NearDuplicates(similarity=options.near_duplicates) if options.near_duplicates else None

    def reason_to_drop(self, conversation: Conversation, row: Row) -> str:
        """Why it is dropped; empty if it is kept. Raises BadRow for a return that is no number."""
        options, count = self._options, num_replies(conversation)
        if not any(map(conversation.is_learnt, range(len(conversation.messages)))):
            return "no assistant message to learn from"
        if conversation.messages[0].role == "assistant":
            return "the first message is the assistant's"
        if options.successes and row.get("success") is not True:
            return "no success"
        if options.min_return > -math.inf and return_of(row, needed=True) < options.min_return:
            return "return below --min-return"
        if count < options.min_replies or (options.max_replies and count > options.max_replies):
            return "too few or too many replies"
        if options.max_chars and num_chars(conversation) > options.max_chars:
            return "longer than --max-chars"
        return self._reason_in_text(conversation)

    def _reason_in_text(self, conversation: Conversation) -> str:
        replies = [
            message.content for index, message in enumerate(conversation.messages) if conversation.is_learnt(index)
        ]
        if self._format and not all(self._format.parse(reply).valid for reply in replies):
            return f"a reply is not in the format {self._options.action_format}"
        if self._options.max_repetition < 1 and repetition(replies) > self._options.max_repetition:
            return "repeats itself"
        digest = xxhash.xxh3_64_intdigest(
            "\0".join(f"{message.role}\0{message.content}" for message in conversation.messages).encode(
                errors="replace"
            )
        )
        if digest in self._seen:
            return "identical to another row"
        self._seen.add(digest)
        if self._near and self._near.add(conversation.messages):
            return "nearly identical to another row"
        return ""


def repetition(replies: Sequence[str]) -> float:
    """The share of the runs of five words in `replies` that came before in them. "a b a b a b a b": 1/2."""
    runs = shingle_hashes(replies)
    return 1 - len(np.unique(runs)) / len(runs)
