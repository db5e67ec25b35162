"""Collects and writes the metrics of each step: sums and counts, divided once and written once.

Only one process may write: two writers in one TensorBoard directory lose points.
"""

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.events import Events
from slipstream.common.process.run_dir import write_whole

MAX_DIGITS = 18  # of a whole number: 10**18 < 2**63
log = logging.getLogger(__name__)
T = TypeVar("T")


class Metrics:
    """The measurements of one step. Each mean is kept as a sum and a count until `means` divides them."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}
        self.texts: dict[str, str] = {}

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


def shown_as_named(name: str) -> Place | None:
    """Every metric in a chart of its own."""
    return Place("", name)


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard's event files."""

    def __init__(
        self,
        *,
        jsonl: Path,
        tensorboard: Path,
        resume_step: int | None = None,
        place: Callable[[str], Place | None] = shown_as_named,
        describe: Callable[[str], str] = lambda tag: "",
    ) -> None:
        """With `resume_step`, records of later steps are removed from both: those steps are made again.

        `place` is where TensorBoard shows a metric, None for nowhere. Its tab "Scalars" shows beside a chart what
        `describe` says of its tag.

        Raises ConfigError if `jsonl` cannot be read.
        """
        if resume_step is not None:
            _cut_after(jsonl, resume_step)
        self._place = place
        self._describe = describe
        self._tensorboard = tensorboard
        self._resume_step = resume_step
        self._jsonl = jsonl.open("a", buffering=1)
        self._events: dict[str, Events] = {}  # by run

    def write(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Write every mean, histogram and text at `step` and return the means."""
        means = metrics.means()
        self._jsonl.write(json.dumps({"step": step, "time": time.time(), **_finite(means)}) + "\n")
        scalars, histograms = self._placed(means), self._placed(metrics.histograms)
        texts = self._placed(metrics.texts)
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
    """A metrics file that is being written, for a process that looks at it again and again."""

    def __init__(self, jsonl: Path) -> None:
        self._jsonl = jsonl
        self._file: tuple[int, int] | None = None  # device and inode: a resumed learner replaces the file
        self._read_bytes = 0
        self._records: list[dict[str, float]] = []

    def records(self) -> Sequence[dict[str, float]]:
        """The records, without the last line if it is incomplete: it is being written. Only what is new is parsed.

        Damaged lines are skipped, and their number is logged. Raises OSError.
        """
        try:
            with self._jsonl.open("rb") as file:
                about = os.fstat(file.fileno())
                if (about.st_dev, about.st_ino) != self._file or about.st_size < self._read_bytes:
                    self._file, self._read_bytes, self._records = (about.st_dev, about.st_ino), 0, []
                file.seek(self._read_bytes)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            self._file, self._records = None, []
            return self._records
        lines = [line for line in lines if line.endswith(b"\n")]
        whole = [record for record in map(_record, lines) if record is not None]
        if len(whole) < len(lines):
            log.warning("%s: %d of %d lines are damaged and skipped", self._jsonl, len(lines) - len(whole), len(lines))
        self._records += whole
        self._read_bytes += sum(map(len, lines))
        return self._records


def read_metrics(jsonl: Path) -> list[dict[str, float]]:
    """The records of a metrics file, as `MetricsFile` reads them once."""
    return list(MetricsFile(jsonl).records())


def _record(line: bytes) -> dict[str, float] | None:
    try:
        record = json.loads(line, parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _whole(text: str) -> int | float:
    """A whole number; a longer one as a float, so that no reader overflows."""
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def _cut_after(jsonl: Path, step: int) -> None:
    try:
        records = read_metrics(jsonl)
    except OSError as error:
        raise ConfigError(f"{jsonl} cannot be read: {error}; move it away, or restore it from a backup") from error
    write_whole(jsonl, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step))


def _finite(means: dict[str, float]) -> dict[str, float | None]:
    # JSON has no NaN and no infinity; null keeps the line readable, and shows that there was no finite value.
    return {name: value if math.isfinite(value) else None for name, value in means.items()}
