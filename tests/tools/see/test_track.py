"""`slipstream track`: what leaves the run's directory, once and only once, and what Prometheus sees."""

import json
import re
import sys
import time
import types
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.common.config.config import Config, RunConfig, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import Metrics, MetricsWriter, Sample
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.see.metrics_window import numbers
from slipstream.tools.see.track.prometheus import PrometheusTracker, exported_name
from slipstream.tools.see.track.track import Sent, new_records, new_samples, read_sent, track
from slipstream.tools.see.track.track_options import TrackOptions

GRAFANA = Path(__file__).parents[3] / "docs" / "grafana.json"
METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path, "demo")
    made.create()
    made.config.write_text(dump_config(Config(run=RunConfig(name="demo", root=str(tmp_path)))))
    return made


def send(run_dir: RunDir, *, name: str = "demo", to: Any = "wandb") -> None:
    config = Config(run=RunConfig(name=name, root=str(run_dir.path.parent)))
    track(config, options=TrackOptions(to=to, once=True))


def write(run_dir: RunDir, *records: Mapping[str, float | None]) -> None:
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_prometheus_gets_the_newest_finite_value_of_every_metric_with_the_name_of_the_run() -> None:
    with closing(PrometheusTracker('de"mo', host="127.0.0.1", port=0)) as tracker:
        tracker.log({"step": 1, "time": 5.0, "produced/success": 0.25, "eval/success_sampled": 0.5})
        tracker.log(numbers({"step": 2, "time": 6.0, "produced/success": 0.75, "optim/grad_norm": None}))
        body = urllib.request.urlopen(tracker.place).read().decode()
    assert 'slipstream_produced_success{run="de\\"mo"} 0.75' in body
    assert 'slipstream_eval_success_sampled{run="de\\"mo"} 0.5' in body and 'slipstream_step{run="de\\"mo"} 2.0' in body
    assert "grad_norm" not in body


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with closing(PrometheusTracker("demo", host="127.0.0.1", port=0)) as first:
        port = int(first.place.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=rf"cannot serve on 127\.0\.0\.1:{port}: .*choose another --port"):
            PrometheusTracker("demo", host="127.0.0.1", port=port)


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
    for to, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(ConfigError, match=f"`--to {to}` needs the package .*pip install {package}"):
            send(run_dir, to=to)
    with pytest.raises(ConfigError, match=r"other has no config\.yaml; `slipstream runs` lists"):
        send(run_dir, name="other")


class OfWandb(types.ModuleType):
    """Stands in for the package: what was logged, the rows of a table in the table's place."""

    Error = RuntimeError
    id, url, dir = "r1", "", "here"

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[dict[str, Any]] = []
        self.resumed: list[str | None] = []
        self.projects: list[str] = []

    def init(self, *, id: str | None, project: str, **_: object) -> "OfWandb":
        self.resumed.append(id)
        self.projects.append(project)
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def Table(self, *, columns: list[str], data: list[list[object]]) -> list[dict[str, object]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        pass


def samples_of(step: int, *, time_s: float) -> list[Sample]:
    return [
        Sample(
            **{"step": step, "time": time_s, "which": which, "task_id": "shop:7", "total_reward": 0.5},
            **{"success": True, "num_turns": 3, "text": "Hi\n\u202e"},
        )
        for which in ("best", "worst", "random")
    ]


def test_samples_are_sent_once_and_those_of_a_step_that_is_made_again_are_sent_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := OfWandb())

    def sent(*steps: int, resume_step: int | None) -> list[dict[str, Any]]:
        writer = MetricsWriter(run_dir, resume_step=resume_step)
        for step in steps:
            metrics = Metrics()
            metrics.samples = samples_of(step, time_s=time.time())
            writer.write(step, metrics)
        writer.close()
        wandb.logged.clear()
        send(run_dir)
        return [logged for logged in wandb.logged if "samples" in logged]

    first, tenth = sent(1, 10, resume_step=None)
    assert (first["step"], tenth["step"]) == (1, 10)
    assert [row["which"] for row in tenth["samples"]] == ["best", "worst", "random"]
    assert tenth["samples"][0] == {
        **{"step": 10, "time": tenth["samples"][1]["time"], "which": "best", "task_id": "shop:7"},
        **{"return": 0.5, "success": True, "num_turns": 3, "text": "Hi\n\u202e"},
    }
    assert sent(resume_step=None) == []
    (again,) = sent(10, resume_step=9)
    assert len(again["samples"]) == 3 and again["samples"][0]["time"] > tenth["samples"][0]["time"]
    assert run_dir.samples.read_bytes().count(b"\n") == 6
    assert wandb.resumed == [None, "r1", "r1"]


def test_the_project_is_the_packages_variable_as_under_up(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := OfWandb())
    write(run_dir, {"step": 1, "time": 10.0})
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    send(run_dir)
    monkeypatch.setenv("WANDB_PROJECT", "agents")
    send(run_dir)
    assert wandb.projects == ["slipstream", "agents"]


def test_lines_that_are_no_samples_are_skipped(run_dir: RunDir) -> None:
    whole = [msgspec.json.encode(sample) for sample in samples_of(1, time_s=10.0)]
    garbage = [b"\xff", b"[]", b'{"step": 1}', b'{"step": 1, "time": "x", "text": 5}', b'{"step": 2, "time": 11.0']
    run_dir.samples.write_bytes(b"\n".join([whole[0], *garbage[:2], whole[1], *garbage[2:4], whole[2], garbage[4]]))
    assert new_samples(run_dir, after_s=0.0, until_s=10.0) == samples_of(1, time_s=10.0)
    assert new_samples(run_dir, after_s=10.0, until_s=20.0) == new_samples(run_dir, after_s=0.0, until_s=9.0) == []


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
    with pytest.raises(ConfigError, match=r"MLflow refused the run: the file store \./mlruns is not .*MLFLOW_TRACKING"):
        send(run_dir, to="mlflow")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "comet"}, "`--to` must be wandb, mlflow or prometheus, got 'comet'"),
        ({"port": 70_000}, "`--port` must be in [0, 65535], got 70000"),
        ({"to": "prometheus", "once": True}, "`--once` must be left out with --to prometheus"),
        ({"to": "mlflow", "host": "0.0.0.0"}, "`--host` must be left out without --to prometheus, got '0.0.0.0'"),
        ({"port": 9465}, "`--port` must be left out without --to prometheus, got 9465"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        TrackOptions(**options)  # type: ignore[arg-type]


def test_every_chart_of_the_dashboard_shows_a_metric_that_is_documented() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for expression in asked for name in re.findall(r"slipstream_\w+", expression)}
    documented = {exported_name(name) for name in re.findall(r"`(\w+/[\w]+)`", METRICS_PAGE.read_text())}
    assert len(dashboard["panels"]) == 8 and len(shown) > 12
    assert shown - documented == set()
