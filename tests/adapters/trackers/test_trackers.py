"""Sends records to the real packages: `wandb` offline, and `mlflow` into a file of its own."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from wandb.proto import wandb_internal_pb2

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import Sample
from slipstream.tools.see.track.mlflow_tracker import MlflowTracker
from slipstream.tools.see.track.wandb_tracker import WandbTracker

Tracker = WandbTracker | MlflowTracker
FULL, LAST = 1, 4  # kinds of a piece: a whole record, or its end
BLOCK = 32_768
SETTINGS = {"run": {"name": "demo"}, "learner": {"steps": 3}}
RECORDS = [
    {"step": 1, "time": 1.7e9, "produced/success": 0.25},
    {"step": 2, "time": 1.7e9 + 2, "produced/success": 0.5},
    {"step": 2, "time": 1.7e9 + 9, "produced/success": 0.75},  # made again by a resumed learner
]
SAMPLES = [
    Sample(
        step=10, time=1.7e9, which=which, task_id="7", total_reward=0.5, success=True, num_turns=2, text=f"{which}\n"
    )
    for which in ("best", "worst", "random")
]


def made(kind: type[Tracker], folder: Path, *, run: str = "") -> Tracker:
    return kind("demo", folder=folder, project="p", settings=SETTINGS, run=run)


def run_with_records(kind: type[Tracker], folder: Path) -> str:
    """The run that all records were sent to, the last one by a tracker that continues it."""
    first = made(kind, folder)
    for record in RECORDS[:2]:
        first.log(record)
    first.close()
    again = made(kind, folder, run=first.run)
    again.log(RECORDS[2])
    again.close()
    assert again.run == first.run
    return first.run


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
    run_with_records(WandbTracker, tmp_path)
    rows = [(row["step"], row["produced/success"]) for row in sent_to_wandb(tmp_path)]
    assert sorted(rows) == [("1", "0.25"), ("2", "0.5"), ("2", "0.75")]


def test_mlflow_gets_every_record_and_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run, client = run_with_records(MlflowTracker, tmp_path), mlflow.MlflowClient()
    history = client.get_metric_history(run, "produced/success")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5), (2, 0.75)]
    assert client.get_run(run).data.params["learner"] == "{'steps': 3}"


def test_wandb_gets_a_table_of_samples_for_each_logged_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = made(WandbTracker, tmp_path)
    tracker.log_samples(SAMPLES)
    tracker.log_samples(SAMPLES[:1])
    tracker.close()
    assert [row["step"] for row in sent_to_wandb(tmp_path) if "samples" in row] == ["10", "10"]
    paths = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json"))
    first, second = (json.loads(path.read_text()) for path in paths)
    assert first["columns"] == ["step", "time", "which", "task_id", "return", "success", "num_turns", "text"]
    assert first["data"][1] == [10, 1.7e9, "worst", "7", 0.5, True, 2, "worst\n"]
    assert len(first["data"]) == 3 and len(second["data"]) == 1


def test_mlflow_gets_a_text_for_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow puts a store's files in the working directory
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    tracker = made(MlflowTracker, tmp_path)
    tracker.log_samples(SAMPLES)
    tracker.close()
    client = mlflow.MlflowClient()
    names = [f"samples/step_10_{which}.txt" for which in ("best", "random", "worst")]
    assert [file.path for file in client.list_artifacts(tracker.run, "samples")] == names
    assert Path(client.download_artifacts(tracker.run, names[0])).read_text() == "best\n"


def test_an_artifact_store_that_cannot_be_used_is_named_and_the_metrics_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.MlflowClient().create_experiment("p", artifact_location="s3://bucket")  # boto3 is not installed
    tracker = made(MlflowTracker, tmp_path)
    tracker.log_samples(SAMPLES)
    tracker.log(RECORDS[0])
    tracker.close()
    assert "MLflow's artifact store refused the samples of step 10: No module named 'boto3'" in caplog.text
    assert len(mlflow.MlflowClient().get_metric_history(tracker.run, "produced/success")) == 1


def test_a_run_that_mlflow_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(ConfigError, match=r"MLflow refused the run: .*MLFLOW_TRACKING_URI"):
        made(MlflowTracker, tmp_path, run="0" * 32)
