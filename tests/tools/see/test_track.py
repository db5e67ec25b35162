"""`slipstream track`: what leaves the run's directory, once and only once, and what Prometheus sees."""

import json
import re
import sys
import types
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from slipstream.common.config.config import Config, RunConfig, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.see.track.prometheus import PrometheusTracker, exported_name
from slipstream.tools.see.track.track import Sent, finite, new_records, read_sent, track
from slipstream.tools.see.track.track_options import TrackOptions

GRAFANA = Path(__file__).parents[3] / "docs" / "grafana.json"
METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path, "demo")
    made.create()
    made.config.write_text(dump_config(Config(run=RunConfig(name="demo", root=str(tmp_path)))))
    return made


def write(run_dir: RunDir, *records: Mapping[str, float | None]) -> None:
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_prometheus_gets_the_newest_finite_value_of_every_metric_with_the_name_of_the_run() -> None:
    tracker = PrometheusTracker('de"mo', host="127.0.0.1", port=0)
    try:
        tracker.log({"step": 1, "time": 5.0, "produced/success": 0.25, "eval/success_sampled": 0.5})
        tracker.log(finite({"step": 2, "time": 6.0, "produced/success": 0.75, "optim/grad_norm": None}))
        body = urllib.request.urlopen(tracker.place).read().decode()
    finally:
        tracker.close()
    assert 'slipstream_produced_success{run="de\\"mo"} 0.75' in body
    assert 'slipstream_eval_success_sampled{run="de\\"mo"} 0.5' in body and 'slipstream_step{run="de\\"mo"} 2.0' in body
    assert "grad_norm" not in body


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    first = PrometheusTracker("demo", host="127.0.0.1", port=0)
    port = int(first.place.rpartition(":")[2].partition("/")[0])
    try:
        with pytest.raises(ConfigError, match=rf"cannot serve on 127\.0\.0\.1:{port}: .*choose another --port"):
            PrometheusTracker("demo", host="127.0.0.1", port=port)
    finally:
        first.close()


def test_a_step_that_a_resumed_learner_makes_again_is_sent_again_and_no_other(run_dir: RunDir) -> None:
    write(run_dir, {"step": 1, "time": 10.0}, {"step": 2, "time": 20.0}, {"step": 3, "time": 30.0})
    assert [record["step"] for record in new_records(run_dir, after_s=0.0)] == [1, 2, 3]
    write(run_dir, {"step": 1, "time": 10.0}, {"step": 2, "time": 45.0})
    assert new_records(run_dir, after_s=30.0) == [{"step": 2, "time": 45.0}]


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"last_s": "x"}', b'{"last": 1}', b"\xff"])
def test_a_damaged_note_of_what_was_sent_is_an_error_that_says_what_to_do(run_dir: RunDir, garbage: bytes) -> None:
    assert read_sent(run_dir, "wandb") == Sent()
    (run_dir.path / "tracked_by_wandb.json").write_bytes(garbage)
    with pytest.raises(ConfigError, match=r"tracked_by_wandb\.json is damaged: .*; remove it"):
        read_sent(run_dir, "wandb")


def test_a_tracker_that_is_not_installed_and_a_run_that_does_not_exist_are_named(run_dir: RunDir) -> None:
    config = Config(run=RunConfig(name="demo", root=str(run_dir.path.parent)))
    for to, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(ConfigError, match=f"`--to {to}` needs the package .*pip install {package}"):
            track(config, options=TrackOptions(to=to, once=True))
    config.run.name = "other"
    with pytest.raises(ConfigError, match=r"other has no config\.yaml; `slipstream runs` lists"):
        track(config, options=TrackOptions(once=True))


class Unusable:
    """MLflow's client, with a store in files that this version of it does not take."""

    def __init__(self) -> None:
        raise MlflowException("the file store\n./mlruns is not supported")


class MlflowException(Exception):
    pass


def test_a_store_that_mlflow_refuses_is_named(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mlflow")
    module.MlflowClient, module.MlflowException = Unusable, MlflowException  # type: ignore[attr-defined]
    module.get_tracking_uri = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    config = Config(run=RunConfig(name="demo", root=str(run_dir.path.parent)))
    with pytest.raises(ConfigError, match=r"MLflow refused the run: the file store \./mlruns is not .*MLFLOW_TRACKING"):
        track(config, options=TrackOptions(to="mlflow", once=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "comet"}, "`--to` must be wandb, mlflow or prometheus, got 'comet'"),
        ({"port": 70_000}, "`--port` must be in [0, 65535], got 70000"),
        ({"to": "prometheus", "once": True}, "`--once` must be left out with --to prometheus"),
        ({"project": ""}, "`--project` must be a name"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        TrackOptions(**options)  # type: ignore[arg-type]


def test_every_chart_of_the_dashboard_shows_a_metric_that_is_documented() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"slipstream_\w+", target["expr"])
    }
    documented = {exported_name(name) for name in re.findall(r"`(\w+/[\w]+)`", METRICS_PAGE.read_text())}
    assert len(dashboard["panels"]) == 8 and len(shown) > 12
    assert shown - documented == set()
