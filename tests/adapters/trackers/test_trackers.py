"""Sends records to the real packages: `wandb` offline, and `mlflow` into a file of its own."""

import struct
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from wandb.proto import wandb_internal_pb2

from slipstream.common.process.config_error import ConfigError
from slipstream.tools.see.track.mlflow_tracker import MlflowTracker
from slipstream.tools.see.track.wandb_tracker import WandbTracker

FULL, LAST = 1, 4  # kinds of a piece: a whole record, or its end
BLOCK = 32_768
SETTINGS = {"run": {"name": "demo"}, "learner": {"steps": 3}}
RECORDS = [
    {"step": 1, "time": 1.7e9, "produced/success": 0.25},
    {"step": 2, "time": 1.7e9 + 2, "produced/success": 0.5},
    {"step": 2, "time": 1.7e9 + 9, "produced/success": 0.75},  # made again by a resumed learner
]


def sent_to_wandb(folder: Path) -> list[dict[str, str]]:
    """The rows of every offline run in `folder`, as W&B will upload them."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append({(item.key or item.nested_key[0]): item.value_json for item in record.history.item})
    return rows


def records_of(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: blocks of 32 KiB, of pieces with checksum, length and kind."""
    place, whole = 7, b""  # after W&B's own header
    while place + 7 <= len(log):
        length, kind = struct.unpack_from("<HB", log, place + 4)
        whole += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK


def test_wandb_gets_every_record_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker("demo", folder=tmp_path, project="p", settings=SETTINGS, run="")
    for record in RECORDS[:2]:
        tracker.log(record)
    tracker.close()
    again = WandbTracker("demo", folder=tmp_path, project="p", settings=SETTINGS, run=tracker.run)
    again.log(RECORDS[2])
    again.close()
    assert again.run == tracker.run
    rows = [(row["step"], row["produced/success"]) for row in sent_to_wandb(tmp_path)]
    assert sorted(rows) == [("1", "0.25"), ("2", "0.5"), ("2", "0.75")]


def test_mlflow_gets_every_record_and_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    tracker = MlflowTracker("demo", folder=tmp_path, project="p", settings=SETTINGS, run="")
    for record in RECORDS[:2]:
        tracker.log(record)
    tracker.close()
    again = MlflowTracker("demo", folder=tmp_path, project="p", settings=SETTINGS, run=tracker.run)
    again.log(RECORDS[2])
    again.close()
    client = mlflow.MlflowClient()
    history = client.get_metric_history(tracker.run, "produced/success")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5), (2, 0.75)]
    assert client.get_run(tracker.run).data.params["learner"] == "{'steps': 3}"


def test_a_run_that_mlflow_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(ConfigError, match=r"MLflow refused the run: .*MLFLOW_TRACKING_URI"):
        MlflowTracker("demo", folder=tmp_path, project="p", settings=SETTINGS, run="0" * 32)
