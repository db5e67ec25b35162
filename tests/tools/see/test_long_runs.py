"""What it costs to look at a run, or to continue it, does not grow with the steps that it has made."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console

from slipstream.common.config.config import Config, RunConfig, dump_config
from slipstream.common.config.learner_config import LearnerConfig
from slipstream.common.process import metrics
from slipstream.common.process.metrics import MetricsWriter
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.run.observer import Observer
from slipstream.tools.launch.scale import _advised
from slipstream.tools.run.up import LineReporter, next_commands
from slipstream.tools.see import metrics_window
from slipstream.tools.see.run_files import read_run
from slipstream.tools.see.runs import runs
from slipstream.tools.see.track.track import new_records
from slipstream.tools.see.view import View
from tests.common.process.test_headline import REST, step

FEW, MANY = 1000, 20_000  # steps
SLACK_BYTES, SLACK_RECORDS = 1 << 18, 100  # a bisection of the longer file takes some more looks


class Reading:
    """A run of some steps, and what is read of its metrics."""

    def __init__(self, root: Path, num_steps: int, client: redis.Redis) -> None:
        self.client, self.num_steps = client, num_steps
        self.config = Config(run=RunConfig(name="long", root=str(root)), learner=LearnerConfig(steps=num_steps))
        self.dir = RunDir(root, "long")
        self.dir.create()
        self.dir.config.write_text(dump_config(self.config))
        made = step(0, episodes=4, success=0.5) | REST
        with self.dir.metrics.open("w") as file:
            for number in range(1, num_steps + 1):
                file.write(json.dumps(made | {"step": number, "time": 1.8e9 + number}) + "\n")
                if number % 50 == 0:
                    evaluation = {"eval/success_sampled": 0.5, "eval/success_greedy": 0.5, "eval/num_tasks": 32}
                    file.write(json.dumps({"step": number, "time": 1.8e9 + number + 0.5} | evaluation) + "\n")
        self.num_bytes = self.num_records = 0
        self.observer = Observer(client, self.config)

    def cost(self, read: Callable[["Reading"], object]) -> tuple[int, int]:
        self.num_bytes = self.num_records = 0
        read(self)
        return self.num_bytes, self.num_records


class Counted(io.FileIO):
    """A file that counts the bytes that are read of it."""

    reading: Reading

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.reading.num_bytes += count or 0
        return count

    def readall(self) -> bytes:
        found = super().readall()
        self.reading.num_bytes += len(found)
        return found


@pytest.fixture
def make(tmp_path: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Reading]:
    parse, path_open = metrics._record, Path.open

    def made(num_steps: int) -> Reading:
        reading = Reading(tmp_path / str(num_steps), num_steps, redis_client)

        def counted(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
            if path != reading.dir.metrics or mode not in ("rb", "r+b"):
                return path_open(path, mode, *args, **named)
            raw = Counted(os.fspath(path), mode)
            raw.reading = reading
            return io.BufferedReader(raw) if mode == "rb" else io.BufferedRandom(raw)

        def parsed(line: bytes, *not_finite: float | None) -> dict[str, float] | None:
            reading.num_records += 1
            return parse(line, *not_finite)

        monkeypatch.setattr(Path, "open", counted)
        monkeypatch.setattr(metrics, "_record", parsed)
        return reading

    return made


def resume(of: Reading) -> None:
    out = io.StringIO()
    reporter = LineReporter(Console(file=out), of.dir, of.observer)
    reporter.report()
    assert "step " not in out.getvalue(), "no line of a step that was made before"


def page_of_steps(of: Reading) -> None:
    first = of.num_steps // 2
    assert len(metrics.metrics_of_steps(of.dir.metrics, first, first + 49)) == 50


READERS: dict[str, Callable[[Reading], object]] = {
    "runs": lambda of: runs(of.config),
    "the learner's restart": lambda of: MetricsWriter(of.dir, resume_step=of.num_steps - 5).close(),
    "a poll of track": lambda of: new_records(of.dir, after_s=1.8e9 + of.num_steps - 3),
    "top": lambda of: View(of.client, of.dir, of.config).render(),
    "up --resume": resume,
    "the end of up": lambda of: next_commands(of.config, of.dir, is_finished=False),
    "scale": lambda of: _advised(of.config),
    "a page of steps in view": page_of_steps,
}


def test_every_reader_costs_the_same_at_a_thousand_and_at_20_000_steps(make: Callable[[int], Reading]) -> None:
    costs: dict[str, list[tuple[int, int]]] = {reader: [] for reader in READERS}
    for num_steps in (FEW, MANY):
        reading = make(num_steps)
        whole_bytes = reading.dir.metrics.stat().st_size
        first = reading.cost(lambda of: read_run(of.dir))
        assert first[0] >= whole_bytes, "a report reads the whole run once"
        for reader, read in READERS.items():
            costs[reader].append(reading.cost(read))
    for reader, (few, many) in costs.items():
        assert 0 < many[0] <= few[0] + SLACK_BYTES and many[1] <= few[1] + SLACK_RECORDS, (reader, few, many)


def test_a_report_holds_as_many_records_of_a_longer_run(make: Callable[[int], Reading]) -> None:
    most = metrics_window.NUM_KEPT + metrics_window.NUM_EXACT + 1
    files = read_run(make(MANY // 2).dir)
    assert len(files.steps) <= most and len(files.evaluations) <= metrics_window.NUM_KEPT
    assert sum(record.get(metrics_window.NUM_STEPS, 1) for record in files.steps) == MANY // 2
    assert sum(record["produced/episodes"] for record in files.steps) == 4 * MANY // 2
    assert files.steps[-1]["step"] == MANY // 2 and files.evaluations[0]["step"] == 50
