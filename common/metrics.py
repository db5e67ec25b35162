"""Collects and writes the metrics of each step: sums and counts, divided once and written once.

Only one process may write: two writers in one TensorBoard directory lose points.
"""

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.config_error import ConfigError
from common.run_dir import write_whole

log = logging.getLogger(__name__)


class Metrics:
    """The measurements of one step. Each mean is kept as a sum and a count until `means` divides them."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, the sum of `count` observations, to the mean `name`."""
        self._sums[name] += total
        self._counts[name] += count

    def add_histogram(self, name: str, values: list[float]) -> None:
        self.histograms.setdefault(name, []).extend(values)

    def means(self) -> dict[str, float]:
        """The means by name; one without observations is left out, not 0."""
        return {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name] > 0}


class MetricsWriter:
    """Appends to `metrics.jsonl` and to one TensorBoard event file."""

    def __init__(
        self,
        *,
        jsonl: Path,
        tensorboard: Path,
        resume_step: int | None = None,
        descriptions: Mapping[str, str] | None = None,
    ) -> None:
        """With `resume_step`, records of later steps are removed from both: those steps are made again.

        TensorBoard's tab "Scalars" shows the `descriptions` beside the charts of these names.

        Raises ConfigError if `jsonl` cannot be read.
        """
        if resume_step is not None:
            _cut_after(jsonl, resume_step)
        self._descriptions = descriptions or {}
        self._jsonl = jsonl.open("a", buffering=1)
        self._events = EventFileWriter(str(tensorboard), flush_secs=5)
        if resume_step is not None:
            # TensorBoard's mark of a restart: it discards earlier points at this step and later ones.
            restarted = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=restarted))

    def lay_out(self, charts: Mapping[str, Sequence[str]]) -> None:
        """Define the charts of TensorBoard's "Custom Scalars" tab: each title with patterns of the tags to show."""
        shown = [
            layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
            for title, tags in charts.items()
        ]
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Overview", chart=shown)])
        value = Summary.Value(
            tag=metadata.CONFIG_SUMMARY_TAG,
            metadata=metadata.create_summary_metadata(),
            tensor=TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()]),
        )
        self._events.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))

    def write(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Write every mean and histogram at `step` and return the means."""
        means = metrics.means()
        self._jsonl.write(json.dumps({"step": step, "time": time.time(), **_finite(means)}) + "\n")
        values = [self._scalar(name, value) for name, value in means.items()]
        values += [
            Summary.Value(tag=name, histo=_histogram(samples))
            for name, samples in metrics.histograms.items()
            if samples
        ]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        return means

    def _scalar(self, name: str, value: float) -> Any:
        """A point. TensorBoard's data server reads descriptions only beside tensors."""
        if name not in self._descriptions:
            return Summary.Value(tag=name, simple_value=value)
        described = create_summary_metadata(display_name="", description=self._descriptions[name])
        return Summary.Value(tag=name, metadata=described, tensor=TensorProto(dtype=DT_FLOAT, float_val=[value]))

    def close(self) -> None:
        self._jsonl.close()
        self._events.close()


def read_metrics(jsonl: Path) -> list[dict[str, float]]:
    """The records of a metrics file, without the last line if it is incomplete: it is being written.

    Damaged lines are skipped, and their number is logged.
    """
    if not jsonl.exists():
        return []
    lines = jsonl.read_bytes().splitlines(keepends=True)
    records = [_record(line) for line in lines if line.endswith(b"\n")]
    whole = [record for record in records if record is not None]
    if len(whole) < len(records):
        log.warning("%s: %d of %d lines are damaged and skipped", jsonl, len(records) - len(whole), len(records))
    return whole


def _record(line: bytes) -> dict[str, float] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _cut_after(jsonl: Path, step: int) -> None:
    try:
        records = read_metrics(jsonl)
    except OSError as error:
        raise ConfigError(f"{jsonl} cannot be read: {error}; move it away, or restore it from a backup") from error
    write_whole(jsonl, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step))


def _finite(means: dict[str, float]) -> dict[str, float | None]:
    # JSON has no NaN and no infinity; null keeps the line readable, and shows that there was no finite value.
    return {name: value if math.isfinite(value) else None for name, value in means.items()}


def _histogram(samples: list[float]) -> HistogramProto:
    values = np.asarray(samples, dtype=np.float64)
    counts, edges = np.histogram(values, bins=min(30, max(1, len(np.unique(values)))))
    return HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
