"""Numbers of a step: means are sums over counts, a file can be read at any time, a resumed run rewrites its future."""

import json
import math
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.data_compat import migrate_value
from tensorboard.plugin_util import markdown_to_safe_html

from slipstream.common.process import metrics as metrics_file
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.events import MAX_TEXT_CHARS
from slipstream.common.process.metrics import (
    Metrics,
    MetricsFile,
    MetricsWriter,
    Place,
    Sample,
    metrics_of_steps,
    newest_first,
    newest_metrics,
    read_metrics,
)
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.records.keys import FencedOut
from tests.full_disk import largest_file
from tests.whole.test_loop import points


def of(**values: float) -> Metrics:
    metrics = Metrics()
    for name, value in values.items():
        metrics.add(name, value)
    return metrics


def writing(folder: Path, **named: Any) -> closing[MetricsWriter]:
    return closing(MetricsWriter(RunDir(folder.parent, folder.name), **named))


def sampled(step: int, text: str) -> Metrics:
    metrics = Metrics()
    named = {"which": "best", "task_id": "shop:7", "total_reward": 0.5, "success": True, "num_turns": 1}
    metrics.samples = [Sample(step=step, time=1.7e9 + step, text=text, **named)]
    return metrics


def test_a_mean_is_the_sum_over_the_count() -> None:
    metrics = Metrics()
    metrics.add("loss", 6.0, count=3)
    metrics.add("loss", 1.0, count=1)
    metrics.add("loss", 0.0, count=0)
    metrics.add("reward", 0.0, count=0)
    assert metrics.means() == {"loss": 1.75}, "a mean without observations is left out, and not 0"


@pytest.mark.parametrize("values", [[math.nan, 1.0, math.inf, 3.0], [0.3, 0.1 + 0.2], [-2.0, -2.0]])
def test_a_histogram_is_drawn_of_whatever_a_step_measured(tmp_path: Path, values: list[float]) -> None:
    metrics = of(reward=0.25)
    metrics.add_histogram("ratio", values)
    metrics.add_histogram("lost", [math.nan])
    with writing(tmp_path) as writer:
        writer.write(1, metrics)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert events.Tags()["histograms"] == ["ratio"]
    (event,) = events.Histograms("ratio")
    found = event.histogram_value
    low, high = sorted(filter(math.isfinite, values))
    assert (found.num, found.min, found.max, sum(found.bucket)) == (2, low, high, 2)


def test_a_step_is_one_line_and_one_point(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        metrics = of(reward=0.25)
        metrics.add_histogram("lag", [0.0, 0.0, 1.0])
        metrics.add_histogram("lag", [2.0])
        metrics.add_histogram("empty", [])
        assert writer.write(1, metrics) == {"reward": 0.25}
        (line,) = read_metrics(tmp_path / "metrics.jsonl")  # there before the writer is closed
        assert (line["step"], line["reward"]) == (1, 0.25)
    assert points(tmp_path / "tb", "reward") == [(1, 0.25)]
    (event,) = EventAccumulator(str(tmp_path / "tb")).Reload().Histograms("lag")
    histogram = event.histogram_value
    assert (histogram.num, histogram.min, histogram.max, histogram.sum, histogram.sum_squares) == (4, 0, 2, 3, 5)
    assert list(histogram.bucket) == [2, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path: Path, value: float) -> None:
    with writing(tmp_path) as writer:
        writer.write(1, of(loss=value, reward=0.5))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["reward"]) == (None, 0.5)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["reward"] == 0.5 and "loss" not in record, "what reads records computes with each of their numbers"


def test_a_resumed_run_rewrites_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, of(reward=step / 8))
    with writing(tmp_path, resume_step=3) as writer:
        writer.write(4, of(reward=-1.0))
    expected = [(1, 0.125), (2, 0.25), (3, 0.375), (4, -1.0)]
    assert [(line["step"], line["reward"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert points(tmp_path / "tb", "reward") == expected


def test_samples_of_steps_that_are_made_again_are_replaced_with_a_half_line_of_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with writing(tmp_path) as writer:
        writer.write(1, of(reward=0.5))
        assert not path.exists(), "a step without samples"
        writer.write(2, sampled(2, "two"))
        writer.write(3, sampled(3, "three"))
    with path.open("a") as file:
        file.write('{"step": 4, "ti')
    with writing(tmp_path, resume_step=2) as writer:
        writer.write(3, sampled(3, "again"))
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["two", "again"]
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"samples\.jsonl cannot be read: .*; move it away"):
        writing(tmp_path, resume_step=2)


def test_a_resume_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        for step in range(1, 201):
            writer.write(step, of(reward=step / 8))
    with largest_file(bytes_allowed=2000), writing(tmp_path, resume_step=150):
        pass
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 151))


def test_a_resume_keeps_an_evaluation_of_an_earlier_step_that_was_finished_later(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, of(reward=0.5))
            if step >= 3:
                writer.write(step - 1, of(**{"eval/success_sampled": step / 8}))
    with writing(tmp_path, resume_step=3):
        pass
    records = read_metrics(tmp_path / "metrics.jsonl")
    found = [(record["step"], record.get("eval/success_sampled")) for record in records]
    assert found == [(1, None), (2, None), (3, None), (2, 0.375), (3, 0.5)]


def test_a_writer_that_another_one_has_followed_writes_nothing(tmp_path: Path) -> None:
    def check() -> None:
        raise FencedOut("another learner has taken over")

    with writing(tmp_path, check=check) as writer, pytest.raises(FencedOut):
        writer.write(1, sampled(1, "one"))
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [] and not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("block_bytes", [1, 7, 40, 1 << 16])
def test_a_file_is_read_back_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(metrics_file, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}\n', "not JSON\n", '{"step": 2}\n', '{"step": 3}\n', '{"step": 4, "rew']
    path.write_text("".join(lines))
    found = list(newest_first(path))
    assert [written.record["step"] for written in found] == [3, 2, 1]
    assert [written.end for written in found] == [len("".join(lines[:count])) for count in (4, 3, 1)]
    assert newest_metrics(path, 2) == [{"step": 2}, {"step": 3}]


def test_the_records_of_some_steps_are_found_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "BLOCK_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 201):
            file.write(json.dumps({"step": step, "trained/reward": 0.5}) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step - 5, "eval/success_sampled": 0.5}) + "\n")
    for first in (1, 2, 57, 100, 196):
        assert list(metrics_of_steps(path, first, first + 4)) == list(range(first, first + 5))
    assert list(metrics_of_steps(path, 199, 999)) == [199, 200] and metrics_of_steps(path, 201, 210) == {}


def test_lines_of_one_chart_are_runs_of_their_own(tmp_path: Path) -> None:
    places = {"a": Place("produced", "charts/success"), "b": Place("trained", "charts/success"), "c": None}
    with writing(tmp_path, resume_step=0, place=lambda name: places[name]) as writer:
        for step in range(1, 4):
            writer.write(step, of(a=step / 8, b=0.5, c=1.0))
    written_in = int(time.time())
    while int(time.time()) == written_in:  # TensorBoard reads files in the order of their seconds
        time.sleep(0.01)
    with writing(tmp_path, resume_step=1, place=lambda name: places[name]) as writer:
        writer.write(2, of(a=0.75, b=0.25, c=1.0))
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["produced", "trained"]
    assert points(tmp_path / "tb" / "produced", "charts/success") == [(1, 0.125), (2, 0.75)]
    assert points(tmp_path / "tb" / "trained", "charts/success") == [(1, 0.5), (2, 0.25)]
    assert [record["c"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 1.0], "not in TensorBoard"


def test_text_is_shown_as_it_is_cut_off_and_without_invisible_characters(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.write(1, sampled(1, "<script>\x1b[2J\u202e\n# no heading" + "x" * MAX_TEXT_CHARS))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert events.PluginTagToContent("text") == {"trained/best": b""}
    (event,) = events.Tensors("trained/best")
    shown = event.tensor_proto.string_val[0].decode()
    assert shown.startswith("    <script>\\x1b[2J\\u202e\n    # no heading") and shown.endswith("characters more")
    assert len(shown) < MAX_TEXT_CHARS + 100
    assert "<script>" not in markdown_to_safe_html(shown), "what TensorBoard makes of it"


def test_a_description_is_shown_beside_its_chart_alone(tmp_path: Path) -> None:
    with writing(tmp_path, describe=lambda tag: "Is it learning?" if tag == "reward" else "") as writer:
        writer.write(1, of(reward=0.5, loss=0.25))
        writer.write(2, of(reward=0.75))
    assert points(tmp_path / "tb", "reward") == [(1, 0.5), (2, 0.75)]
    (file,) = (tmp_path / "tb").glob("events.*")
    values = [migrate_value(value) for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    metadata = {value.tag: value.metadata for value in values[:2]}
    described = {tag: (each.summary_description, each.plugin_data.plugin_name) for tag, each in metadata.items()}
    assert described == {"reward": ("Is it learning?", "scalars"), "loss": ("", "scalars")}
    assert [float(value.tensor.float_val[0]) for value in values] == [0.5, 0.25, 0.75]


def test_a_file_that_is_read_again_gives_what_is_new_and_starts_afresh_when_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.records() == []
    with writing(tmp_path) as writer:
        writer.write(1, of(reward=0.5))
        assert [record["step"] for record in file.records()] == [1]
        with path.open("a") as jsonl:
            jsonl.write('not JSON\n{"step": 2, "rew')
        assert [record["step"] for record in file.records()] == [1]
        with path.open("a") as jsonl:
            jsonl.write('ard": 0.25}\n')
        assert [(record["step"], record["reward"]) for record in file.records()] == [(1, 0.5), (2, 0.25)]
    with writing(tmp_path, resume_step=1):
        pass
    assert [record["step"] for record in file.records()] == [1]
