"""Numbers of a step: means are sums over counts, a file can be read at any time, a resumed run rewrites its future."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.data_compat import migrate_value
from tensorboard.plugins.custom_scalar import layout_pb2

from common.metrics import Metrics, MetricsWriter, read_metrics
from tests.full_disk import largest_file


def of(**values: float) -> Metrics:
    metrics = Metrics()
    for name, value in values.items():
        metrics.add(name, value)
    return metrics


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_mean_is_the_sum_over_the_count() -> None:
    metrics = Metrics()
    metrics.add("loss", 6.0, count=3)
    metrics.add("loss", 1.0, count=1)
    metrics.add("loss", 0.0, count=0)
    assert metrics.means() == {"loss": 1.75}


def test_what_nobody_observed_is_left_out_and_not_0() -> None:
    metrics = Metrics()
    metrics.add("reward", 0.0, count=0)
    assert metrics.means() == {}


def test_a_step_is_one_line_and_one_point(tmp_path: Path) -> None:
    writer = MetricsWriter(jsonl=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tb")
    metrics = of(reward=0.25)
    metrics.add_histogram("lag", [0.0, 0.0, 1.0])
    metrics.add_histogram("lag", [2.0])
    metrics.add_histogram("empty", [])
    assert writer.write(1, metrics) == {"reward": 0.25}
    (line,) = read_metrics(tmp_path / "metrics.jsonl")  # there before the writer is closed
    assert (line["step"], line["reward"]) == (1, 0.25)
    writer.close()
    assert scalars(tmp_path / "tb", "reward") == [(1, 0.25)]
    (event,) = EventAccumulator(str(tmp_path / "tb")).Reload().Histograms("lag")
    histogram = event.histogram_value
    assert (histogram.num, histogram.min, histogram.max, histogram.sum, histogram.sum_squares) == (4, 0, 2, 3, 5)
    assert list(histogram.bucket) == [2, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path: Path, value: float) -> None:
    writer = MetricsWriter(jsonl=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tb")
    writer.write(1, of(loss=value, reward=0.5))
    writer.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    assert line["reward"] == 0.5


def test_a_resumed_run_rewrites_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    jsonl, tensorboard = tmp_path / "metrics.jsonl", tmp_path / "tb"
    writer = MetricsWriter(jsonl=jsonl, tensorboard=tensorboard)
    for step in range(1, 6):
        writer.write(step, of(reward=step / 8))
    writer.close()
    writer = MetricsWriter(jsonl=jsonl, tensorboard=tensorboard, resume_step=3)
    writer.write(4, of(reward=-1.0))
    writer.close()
    expected = [(1, 0.125), (2, 0.25), (3, 0.375), (4, -1.0)]
    assert [(line["step"], line["reward"]) for line in read_metrics(jsonl)] == expected
    assert scalars(tensorboard, "reward") == expected


def test_a_resume_on_a_full_disk_leaves_what_was_written(tmp_path: Path) -> None:
    jsonl, tensorboard = tmp_path / "metrics.jsonl", tmp_path / "tb"
    writer = MetricsWriter(jsonl=jsonl, tensorboard=tensorboard)
    for step in range(1, 201):
        writer.write(step, of(reward=step / 8))
    writer.close()
    with pytest.raises(OSError), largest_file(bytes_allowed=2000):
        MetricsWriter(jsonl=jsonl, tensorboard=tensorboard, resume_step=150)
    assert len(read_metrics(jsonl)) == 200


def test_the_overview_lies_in_the_event_file_as_its_plugin_reads_it(tmp_path: Path) -> None:
    writer = MetricsWriter(jsonl=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tb")
    writer.lay_out({"Reward": ["^trained/reward$", "^trained/success$"], "Lag": ["^lag/"]})
    writer.write(1, of(reward=0.5))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert events.PluginTagToContent("custom_scalars") == {"custom_scalars__config__": b""}
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (category,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert charts == {"Reward": ["^trained/reward$", "^trained/success$"], "Lag": ["^lag/"]}
    assert scalars(tmp_path / "tb", "reward") == [(1, 0.5)]


def test_a_description_is_shown_beside_its_chart_alone(tmp_path: Path) -> None:
    writer = MetricsWriter(
        jsonl=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tb", descriptions={"reward": "Is it learning?"}
    )
    writer.write(1, of(reward=0.5, loss=0.25))
    writer.close()
    (file,) = (tmp_path / "tb").glob("events.*")
    values = [migrate_value(value) for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    described = {
        value.tag: (value.metadata.summary_description, value.metadata.plugin_data.plugin_name) for value in values
    }
    assert described == {"reward": ("Is it learning?", "scalars"), "loss": ("", "scalars")}
    assert [float(value.tensor.float_val[0]) for value in values] == [0.5, 0.25]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1, "reward": 0.5}]


def test_a_half_line_of_a_crash_does_not_spoil_what_a_resumed_run_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    writer = MetricsWriter(jsonl=path, tensorboard=tmp_path / "tb", resume_step=1)
    writer.write(2, of(reward=0.75))
    writer.close()
    assert [(line["step"], line["reward"]) for line in read_metrics(path)] == [(1, 0.5), (2, 0.75)]


def test_a_run_that_did_not_begin_yet_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
