"""Collects and writes the metrics of each step: sums and counts, divided once and written once.

Only one process may write: two writers in one TensorBoard directory lose points.
"""

import itertools
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.events import Events
from slipstream.common.process.run_dir import RunDir

MAX_DIGITS = 18  # of a whole number: 10**18 < 2**63
BLOCK_BYTES = 1 << 16  # of a file that is read from its end
NUM_NEWEST = 200  # records; a live view shows no older ones, so it costs the same at any length of the run
log = logging.getLogger(__name__)
T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One of the episodes that a step shows as text: a line of `samples.jsonl`."""

    step: int
    time: float  # unix
    which: str  # of the step's episodes: best, worst or random
    task_id: str
    total_reward: float = msgspec.field(name="return")
    success: bool
    num_turns: int
    text: str


class Metrics:
    """The measurements of one step. Each mean is kept as a sum and a count until `means` divides them."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}
        self.samples: Sequence[Sample] = ()

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, the sum of `count` observations, to the mean `name`."""
        self._sums[name] += total
        self._counts[name] += count

    def add_histogram(self, name: str, values: list[float]) -> None:
        self.histograms.setdefault(name, []).extend(values)

    def means(self) -> dict[str, float]:
        """The means by name; one without observations is left out, not 0."""
        return {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name] > 0}


class Place(NamedTuple):
    """Where TensorBoard shows a metric."""

    run: str  # the folder below `tb/`; lines of one chart are runs of their own, each with its colour
    tag: str  # the chart


class MetricsWriter:
    """Appends to `metrics.jsonl`, `samples.jsonl` and TensorBoard's event files."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        resume_step: int | None = None,
        place: Callable[[str], Place | None] = lambda name: Place("", name),
        describe: Callable[[str], str] = lambda tag: "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """With `resume_step`, records of later steps are removed from all: those steps are made again.

        `check` raises FencedOut if another process writes these files now; it is called before each record.

        `place` is where TensorBoard shows a metric: by default in a chart of its own; None for nowhere. Its tab
        "Scalars" shows beside a chart what `describe` says of its tag.

        Raises ConfigError if `metrics.jsonl` or `samples.jsonl` cannot be read.
        """
        if resume_step is not None:
            for path in (run_dir.metrics, run_dir.samples):
                _cut_after(path, resume_step)
        self._place = place
        self._describe = describe
        self._check = check
        self._tensorboard = run_dir.tensorboard
        self._resume_step = resume_step
        self._jsonl = run_dir.metrics.open("a", buffering=1)
        self._samples = run_dir.samples
        self._events: dict[str, Events] = {}  # by run

    def write(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Write every mean, histogram and sample at `step` and return the means."""
        self._check()
        means = metrics.means()
        if metrics.samples:  # before the record: a reader that sees it finds them whole
            with self._samples.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(metrics.samples))
        # JSON has no NaN and no infinity; null keeps the line readable, and shows that there was no finite value.
        finite = {name: value if math.isfinite(value) else None for name, value in means.items()}
        self._jsonl.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        scalars, histograms = self._placed(means), self._placed(metrics.histograms)
        texts = self._placed({f"trained/{sample.which}": sample.text for sample in metrics.samples})
        for run in dict.fromkeys([*scalars, *histograms, *texts]):
            self._events_of(run).write(step, scalars.get(run, {}), histograms=histograms.get(run), texts=texts.get(run))
        return means

    def close(self) -> None:
        self._jsonl.close()
        for events in self._events.values():
            events.close()

    def _placed(self, values: Mapping[str, T]) -> dict[str, dict[str, T]]:
        """The values that are shown, by run and tag."""
        placed: dict[str, dict[str, T]] = {}
        for name, value in values.items():
            if place := self._place(name):
                placed.setdefault(place.run, {})[place.tag] = value
        return placed

    def _events_of(self, run: str) -> Events:
        if run not in self._events:
            self._events[run] = Events(self._tensorboard / run, resume_step=self._resume_step, describe=self._describe)
        return self._events[run]


class MetricsFile:
    """The newest records of a metrics file that is being written, for a process that looks at it again and again."""

    def __init__(self, jsonl: Path) -> None:
        self._jsonl = jsonl
        self._seen: os.stat_result | None = None
        self._records: list[dict[str, float]] = []

    def records(self) -> Sequence[dict[str, float]]:
        """At most NUM_NEWEST records, the newest last. The file is only read if it has changed. Raises OSError."""
        seen = self._jsonl.stat() if self._jsonl.exists() else None
        if seen is None or self._seen is None or (seen.st_ino, seen.st_size) != (self._seen.st_ino, self._seen.st_size):
            self._records, self._seen = newest_metrics(self._jsonl), seen
        return self._records


class Written(NamedTuple):
    """A record of a metrics file, and where its line ends."""

    record: dict[str, float]
    end: int  # in bytes


def read_metrics(jsonl: Path, *, not_finite: float | None = None) -> Iterator[dict[str, float]]:
    """The records of a metrics file from the first on, one at a time; none if there is no file.

    What was not finite is left out, unless `not_finite` stands for it.

    Without the last line if it is incomplete: it is being written. Damaged lines are skipped, and their number is
    logged. Raises OSError.
    """
    return (written.record for written in read_from(jsonl, 0, not_finite=not_finite))


def read_from(jsonl: Path, start: int, *, not_finite: float | None = None) -> Iterator[Written]:
    """Like `read_metrics`, from the byte `start` on, where a line begins."""
    num_damaged = 0
    if jsonl.exists():
        with jsonl.open("rb") as file:
            file.seek(start)
            for line in file:
                start += len(line)
                if (record := _record(line, not_finite)) is not None:
                    yield Written(record, start)
                else:
                    num_damaged += line.endswith(b"\n")
    if num_damaged:
        log.warning("%s: %d lines are damaged and skipped", jsonl, num_damaged)


def metrics_of_steps(jsonl: Path, first: int, last: int) -> dict[int, dict[str, float]]:
    """The records of the optimizer steps `first` to `last`, by step. They are found by bisection. Raises OSError."""
    start, stop = 0, jsonl.stat().st_size if jsonl.exists() else 0
    while stop - start > BLOCK_BYTES:
        middle = (start + stop) // 2
        with jsonl.open("rb") as file:
            file.seek(middle)
            line = middle + len(file.readline())  # where the next one begins
        found = next(
            (each for each in read_from(jsonl, line, not_finite=math.nan) if "trained/reward" in each.record), None
        )
        if found and found.record["step"] < first:
            start = found.end
        else:
            stop = middle
    steps = (each.record for each in read_from(jsonl, start, not_finite=math.nan) if "trained/reward" in each.record)
    wanted = itertools.takewhile(lambda step: step["step"] <= last, steps)
    return {int(step["step"]): step for step in wanted if step["step"] >= first}


def newest_metrics(jsonl: Path, count: int = NUM_NEWEST) -> list[dict[str, float]]:
    """The newest `count` records, the newest last; the rest of the file is not read. Raises OSError."""
    return [written.record for written in itertools.islice(newest_first(jsonl), count)][::-1]


def newest_first(jsonl: Path) -> Iterator[Written]:
    """The records of a metrics file from the last one back: as much is read as is asked for. Raises OSError."""
    if not jsonl.exists():
        return
    with jsonl.open("rb") as file:
        start, begun = file.seek(0, os.SEEK_END), b""  # `begun` is a part of a line whose beginning is not read yet
        while start:
            size = min(BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            lines = (file.read(size) + begun).splitlines(keepends=True)
            begun = lines.pop(0) if start else b""
            end = start + len(begun) + sum(map(len, lines))
            for line in reversed(lines):
                if (record := _record(line)) is not None:
                    yield Written(record, end)
                end -= len(line)


def _record(line: bytes, not_finite: float | None = None) -> dict[str, float] | None:
    """The record of a whole line, as in `read_metrics`; None if the line is damaged, or still being written."""
    try:
        record = json.loads(line, parse_int=_whole) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    values = ((name, not_finite if value is None else value) for name, value in record.items())
    return {name: value for name, value in values if value is not None}


def _whole(text: str) -> int | float:
    """A whole number; a longer one as a float, so that no reader overflows."""
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def _cut_after(jsonl: Path, step: int) -> None:
    """Remove the records of later steps, and an incomplete last line. Only the end of the file is read.

    Records are in the order of their steps, except that an evaluation is recorded when it is finished.
    """
    kept, end = list[dict[str, float]](), 0
    try:
        if not jsonl.exists():
            jsonl.unlink(missing_ok=True)  # a link that leads nowhere
            return
        for written in newest_first(jsonl):
            if written.record["step"] <= step:
                if "eval/success_sampled" not in written.record:
                    end = written.end
                    break
                kept.append(written.record)
        rest = "".join(json.dumps(record) + "\n" for record in reversed(kept)).encode()
        with jsonl.open("r+b") as file:
            file.seek(end)
            file.write(rest)
            file.truncate()
    except OSError as error:
        raise ConfigError(f"{jsonl} cannot be read: {error}; move it away, or restore it from a backup") from error
