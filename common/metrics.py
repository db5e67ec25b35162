"""Numbers of one step: sums and counts while they come, divided once, written once.

One process writes: two writers in one TensorBoard directory lose points.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.run_dir import write_whole


class Metrics:
    """What one step measured. A mean is a sum and a count until `means` divides it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, which stands for `count` observations, to the mean `name`."""
        self._sums[name] += total
        self._counts[name] += count

    def add_histogram(self, name: str, values: list[float]) -> None:
        self.histograms.setdefault(name, []).extend(values)

    def means(self) -> dict[str, float]:
        """Each mean; what has no observation is left out, not 0."""
        return {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name] > 0}


class MetricsWriter:
    """Appends to `metrics.jsonl` and to one TensorBoard event file."""

    def __init__(self, *, jsonl: Path, tensorboard: Path, resume_step: int | None = None) -> None:
        """With `resume_step`, what was written at later steps is dropped from both: those steps are made again."""
        if resume_step is not None:
            _cut_after(jsonl, resume_step)
        self._jsonl = jsonl.open("a", buffering=1)
        self._events = EventFileWriter(str(tensorboard), flush_secs=5)
        if resume_step is not None:
            # What TensorBoard calls a restart: points at this step and later, written before now, are purged.
            restarted = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=restarted))

    def lay_out(self, charts: Mapping[str, Sequence[str]]) -> None:
        """Make TensorBoard's "Custom Scalars" tab show `charts`: of each title, the tags that match its expressions."""
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
        values = [Summary.Value(tag=name, simple_value=value) for name, value in means.items()]
        values += [
            Summary.Value(tag=name, histo=_histogram(samples))
            for name, samples in metrics.histograms.items()
            if samples
        ]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        return means

    def close(self) -> None:
        self._jsonl.close()
        self._events.close()


def read_metrics(jsonl: Path) -> list[dict[str, float]]:
    """Every whole line of a metrics file; a line that is being written is left out."""
    if not jsonl.exists():
        return []
    return [json.loads(line) for line in jsonl.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _cut_after(jsonl: Path, step: int) -> None:
    kept = [record for record in read_metrics(jsonl) if record["step"] <= step]
    write_whole(jsonl, "".join(json.dumps(record) + "\n" for record in kept))


def _finite(means: dict[str, float]) -> dict[str, float | None]:
    # JSON has no NaN; null keeps the line readable and the fact visible.
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
