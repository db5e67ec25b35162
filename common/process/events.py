"""Writes the event file of one TensorBoard run. TensorBoard gives each of its runs a colour of its own.

Only one process may write to a run: with two writers in one directory, points are lost.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from slipstream.common.process.printable import printable

FLUSH_S = 5
MAX_TEXT_CHARS = 8000  # of an episode


class Events:
    """One event file."""

    def __init__(self, folder: Path, *, resume_step: int | None = None, describe: Callable[[str], str]) -> None:
        """With `resume_step`, TensorBoard discards the points of later steps that an earlier writer left in `folder`.

        TensorBoard's tab "Scalars" shows beside a chart what `describe` says of its tag.
        """
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        self._describe = describe
        self._described = set[str]()
        if resume_step is not None:
            restarted = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=restarted))

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        *,
        histograms: Mapping[str, Sequence[float]] | None = None,
        texts: Mapping[str, str] | None = None,
        time_s: float | None = None,
    ) -> None:
        """Write one point for each tag; `time_s` is its unix time, now if None. Histograms are of finite numbers."""
        values = [self._scalar(tag, value) for tag, value in scalars.items()]
        finite = {tag: list(filter(math.isfinite, of)) for tag, of in (histograms or {}).items()}
        values += [Summary.Value(tag=tag, histo=_histogram(of)) for tag, of in finite.items() if of]
        values += [_text(tag, text) for tag, text in (texts or {}).items()]
        self._writer.add_event(
            Event(wall_time=time.time() if time_s is None else time_s, step=step, summary=Summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()

    def _scalar(self, tag: str, value: float) -> Any:
        """A point. TensorBoard's data server reads descriptions only beside tensors, and only with a tag's first."""
        description = self._describe(tag)
        if not description:
            return Summary.Value(tag=tag, simple_value=value)
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[value])
        if tag in self._described:
            return Summary.Value(tag=tag, tensor=tensor)
        self._described.add(tag)
        described = scalar_metadata.create_summary_metadata(display_name="", description=description)
        return Summary.Value(tag=tag, metadata=described, tensor=tensor)


def _text(tag: str, text: str) -> Any:
    """At most MAX_TEXT_CHARS of text, indented so that Markdown shows it as it is, invisible characters escaped."""
    cut = "" if len(text) <= MAX_TEXT_CHARS else f"\n... {len(text) - MAX_TEXT_CHARS} characters more"
    lines = [f"    {printable(line)}" for line in (text[:MAX_TEXT_CHARS] + cut).split("\n")]
    return text_pb(tag, "\n".join(lines)).value[0]


def _histogram(samples: Sequence[float]) -> HistogramProto:
    values = np.asarray(samples, dtype=np.float64)
    # numpy refuses to divide what differs by rounding alone, as returns of 0.3 and of 0.1 + 0.2 do.
    differ = np.ptp(values) > 1e-9 * np.abs(values).max()
    counts, edges = np.histogram(values, bins=min(30, len(np.unique(values))) if differ else 1)
    return HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
