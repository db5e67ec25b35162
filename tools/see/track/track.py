"""`slipstream track`: sends the metrics and samples of a run, live or finished, to W&B, MLflow or Prometheus.

It is a process of its own that reads the run's `metrics.jsonl` and `samples.jsonl`. So a tracker that
hangs, or is not reachable, never delays the learner.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import yaml

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.metrics import Sample, newest_first, read_metrics
from slipstream.common.process.output import held, read_json, write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import standing
from slipstream.common.process.shutdown import Shutdown
from slipstream.tools.see.metrics_window import numbers
from slipstream.tools.see.track.mlflow_tracker import MlflowTracker
from slipstream.tools.see.track.prometheus import PrometheusTracker
from slipstream.tools.see.track.track_options import TrackOptions
from slipstream.tools.see.track.wandb_tracker import WandbTracker

POLL_S = 2.0
PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}  # the packages' own variables

log = logging.getLogger(__name__)


class Sent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tracker has received of a run; kept in the run's directory, so that nothing is sent twice."""

    tracker_run: str = ""  # the tracker's own name of the run; empty before the first record
    last_s: float = 0.0  # unix time of the newest record that was sent


class Tracker(Protocol):
    """Receives the records of one run."""

    place: str  # where a person finds the run: a link, or a folder
    run: str  # the tracker's own name of the run, by which it is continued later

    def log(self, record: Mapping[str, float]) -> None:
        """Send one record: `step`, `time` and finite numbers by name."""

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Send the samples of one step."""

    def close(self) -> None:
        """Wait until everything is sent."""


def track(config: Config, *, options: TrackOptions) -> int:
    """Send the records that exist, then each new one until the run ends; return the exit code. Raises ConfigError."""
    log_to_stderr()
    run_dir = RunDir(config.run.root, config.run.name)
    if not run_dir.config.is_file():
        raise ConfigError(
            f"{run_dir.path} has no config.yaml; `slipstream runs` lists the runs under {config.run.root}/"
        )
    with held(_note(run_dir, options.to)):
        return _track(config, run_dir, options)


def _track(config: Config, run_dir: RunDir, options: TrackOptions) -> int:
    shutdown = Shutdown()
    tracker, sent = _begin(run_dir, config.run.name, options)
    try:
        while True:
            before, is_asked_to_end = sent, shutdown.requested.is_set()
            for record in new_records(run_dir, after_s=sent.last_s):
                tracker.log(record)
                sent = Sent(tracker_run=tracker.run, last_s=record["time"])
            if sent is not before:
                new = new_samples(run_dir, after_s=before.last_s, until_s=sent.last_s)
                for _, samples in itertools.groupby(new, key=lambda sample: sample.step):
                    tracker.log_samples(list(samples))
                write_whole(_note(run_dir, options.to), msgspec.json.encode(sent))
            if options.once or (sent is before and options.to != "prometheus" and not standing(run_dir).is_live):
                return 0
            if is_asked_to_end:  # what was written before has been sent
                return shutdown.exit_code
            shutdown.requested.wait(POLL_S)
    finally:
        tracker.close()


def _begin(run_dir: RunDir, name: str, options: TrackOptions) -> tuple[Tracker, Sent]:
    settings = yaml.safe_load(run_dir.config.read_bytes())
    if options.to == "prometheus":
        server = PrometheusTracker(name, host=options.host, port=options.port)
        log.info("serving the metrics of %s at %s", name, server.place)
        return server, Sent()
    sent = read_sent(run_dir, options.to)
    kind = WandbTracker if options.to == "wandb" else MlflowTracker
    project = os.environ.get(PROJECTS[options.to]) or "slipstream"
    tracker = kind(name, folder=run_dir.path, project=project, settings=settings, run=sent.tracker_run)
    log.info("slipstream track: %s receives the metrics of %s at %s", options.to, name, tracker.place)
    return tracker, sent


def new_records(run_dir: RunDir, *, after_s: float) -> Iterable[dict[str, float]]:
    """The records written after `after_s`. A resumed learner makes steps again; their new records count as new."""
    if not after_s:
        return map(numbers, read_metrics(run_dir.metrics))
    new = itertools.takewhile(lambda each: each.record.get("time", 0.0) > after_s, newest_first(run_dir.metrics))
    return [numbers(each.record) for each in new][::-1]


def new_samples(run_dir: RunDir, *, after_s: float, until_s: float) -> list[Sample]:
    """The samples after `after_s`, until the record of `until_s`: those of a step are written before its record."""
    new = list[Sample]()
    for written in newest_first(run_dir.samples):
        with contextlib.suppress(msgspec.ValidationError):
            sample = msgspec.convert(written.record, Sample)
            if sample.time <= after_s:
                break
            new.append(sample)
    return [sample for sample in reversed(new) if sample.time <= until_s]


def read_sent(run_dir: RunDir, to: str) -> Sent:
    """What the tracker `to` has received so far. Raises ConfigError if the note of it is damaged."""
    path, cure = _note(run_dir, to), "remove it, and all records are sent to a new run"
    return read_json(path, Sent, cure=cure) if path.exists() else Sent()


def _note(run_dir: RunDir, to: str) -> Path:
    return run_dir.path / f"tracked_by_{to}.json"
