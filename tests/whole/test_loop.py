"""The whole loop as a person starts it: `slipstream up`, on this machine, to the end."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.lab.loopback_server import start_server
from tests.learner.lead.test_metrics_page import explained
from tests.processes import CLI, MARK, REPOSITORY, nothing_runs

PARTS = ["wait", "archive", "measure", "pack", "forward", "backward", "optimizer"]
PARTS += ["publish", "evaluate", "record", "checkpoint"]
UP_TIMEOUT_S = 1000.0


@dataclass(frozen=True, kw_only=True)
class Length:
    num_steps: int
    eval_every: int
    num_tasks: int  # held out
    checkpoint_every: int
    warm_start: int  # episodes
    groups: int  # a step
    drops_equal: bool  # groups, of which all are equal after a short warm start


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_up_trains_from_nothing_to_a_better_policy(run_id: str, tmp_path: Path) -> None:
    length = Length(
        num_steps=30, eval_every=8, num_tasks=100, checkpoint_every=20, warm_start=2500, groups=8, drops_equal=True
    )
    check_that_it_learned(run_to_the_end(run_id, tmp_path, length))


@pytest.mark.timeout(1200)
def test_up_runs_from_nothing_to_its_end_and_leaves_a_whole_account(run_id: str, tmp_path: Path) -> None:
    length = Length(
        num_steps=7, eval_every=3, num_tasks=16, checkpoint_every=4, warm_start=100, groups=4, drops_equal=False
    )
    run_to_the_end(run_id, tmp_path, length)


def run_to_the_end(run_id: str, tmp_path: Path, length: Length) -> dict[str, Any]:
    """Its summary, which agrees with all else that it leaves."""
    run_dir = RunDir(tmp_path, run_id)
    up = ["up", str(REPOSITORY / "conf/quickstart.yaml"), f"run.name={run_id}", f"run.root={tmp_path}"]
    up += [f"learner.steps={length.num_steps}", f"learner.checkpoint_every={length.checkpoint_every}"]
    up += [f"eval.every={length.eval_every}", f"eval.num_tasks={length.num_tasks}"]
    up += [f"warm_start.episodes={length.warm_start}", f"replay.groups_per_step={length.groups}"]
    up += ["env.rewards={patience: {part: 'tests.guess:patience', weight: 0}}"]
    up += [f"replay.drop_zero_variance={str(length.drops_equal).lower()}"]
    up += ["sampling.temperature=1"]  # at the quickstart's own it begins where thirty steps lead to
    said = slipstream(up, mark=run_id, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert nothing_runs(run_id)
    records = list(read_metrics(run_dir.metrics))
    steps = [record for record in records if "trained/reward" in record]
    assert [record["step"] for record in steps] == list(range(1, length.num_steps + 1))
    assert all(record["trained/value_of_patience"] == 0.25 for record in steps)
    summary: dict[str, Any] = json.loads(run_dir.summary.read_text())

    check_the_summary(summary, length)
    check_that_times_add_up(steps, length.checkpoint_every)
    check_the_evaluations_in_training(summary, records, length)
    check_the_names(records)
    check_tensorboard(run_dir, steps)
    assert "held-out success, final" in said and "balanced" in said
    with start_server(run_dir.redis) as server:  # the run's own, on what it left
        audit = ["replay", "audit", f"run.name={run_id}", f"redis.url={server.url}"]
        audited = slipstream(audit, mark=run_id, cwd=tmp_path, SLIPSTREAM_REDIS_PASSWORD=server.password)
    assert "WRONG" not in audited and f"{run_id}: train" in audited
    return summary


def check_that_it_learned(summary: dict[str, Any]) -> None:
    """Thirty steps raise held-out success by .2 or more, and it is measured to within .05: a rise of .05 is no luck.

    What was trained shows none: groups that all solve, or all fail, are not in it.
    """
    evaluations = summary["eval"]
    assert evaluations["final"]["sampled"] > evaluations["warm_start"]["sampled"] + 0.05
    assert evaluations["warm_start"]["sampled"] > evaluations["initial"]["sampled"]


def check_the_summary(summary: dict[str, Any], length: Length) -> None:
    assert set(summary["eval"]) == {"initial", "warm_start", "final"}
    for result in summary["eval"].values():
        assert set(result) == {"sampled", "greedy", "num_tasks", "sampled_in", "greedy_in"}
        assert result["num_tasks"] == length.num_tasks
        assert result["sampled_in"] == result["greedy_in"] == {}, "one environment"
        assert 0 <= result["sampled"] <= 1 and 0 <= result["greedy"] <= 1
    ledger = summary["ledger"]
    assert ledger["balanced"]
    held = ledger["claimed"] + ledger["ready"] + ledger["leased"] + ledger["queued"]
    assert ledger["opened"] == ledger["trained"] + sum(ledger["dropped"].values()) + held
    assert ledger["trained"] == length.groups * length.num_steps
    assert sum(ledger["episodes"].values()) == ledger["inserted"] >= ledger["trained_trajectories"]
    assert 0 <= summary["produced"]["low"] <= summary["produced"]["success"] <= summary["produced"]["high"] <= 1
    assert sum(summary["lag"].values()) == ledger["trained_trajectories"] == 8 * ledger["trained"]
    assert summary["tokens_per_s"]["generated"] > 0 and summary["tokens_per_s"]["trained"] > 0
    assert 0 < summary["first_reward_s"] < summary["wall_s"] < UP_TIMEOUT_S


def check_that_times_add_up(steps: list[dict[str, float]], checkpoint_every: int) -> None:
    """The parts of a step are its whole: from one record to the next nothing is left, checkpoints included."""
    for record in steps[1:]:
        whole_s = sum(record[f"time/{part}_s"] for part in PARTS)
        assert record["perf/step_s"] == pytest.approx(whole_s, rel=1e-9)
        assert record["perf/learner_busy"] == pytest.approx(1 - record["time/wait_s"] / whole_s, abs=1e-9)
        assert all(record[f"time/{part}_s"] > 0 for part in PARTS)
    elapsed_s = steps[-1]["time"] - steps[0]["time"]
    accounted_s = sum(record["perf/step_s"] for record in steps[1:])
    assert accounted_s == pytest.approx(elapsed_s, rel=0.01)  # the parts end where the line is made, not written
    (after_checkpoint,) = [record["time/checkpoint_s"] for record in steps if record["step"] == checkpoint_every + 1]
    assert after_checkpoint > 10 * min(record["time/checkpoint_s"] for record in steps[1:])  # the others made none


def check_the_evaluations_in_training(summary: dict[str, Any], records: list[dict[str, float]], length: Length) -> None:
    """Each is of one version, that of its step, and steps were made meanwhile."""
    during = summary["eval_during"]
    assert during
    evaluated = [place for place, record in enumerate(records) if "eval/success_sampled" in record]
    for result in during:
        assert result["step"] >= length.eval_every and 0 <= result["sampled"] <= 1
        assert result["num_tasks"] == length.num_tasks
        place = next(place for place in evaluated if records[place]["step"] == result["step"])
        assert records[place]["eval/success_sampled"] == result["sampled"] and records[place]["eval/num_mixed"] == 0
        meanwhile = [other["step"] for other in records[:place] if "trained/reward" in other]
        assert max(meanwhile) > result["step"]
    versions = [result["policy_version"] - result["step"] for result in during]
    assert len(set(versions)) == 1  # a version a step, and the warm start's before them


def check_the_names(records: list[dict[str, float]]) -> None:
    """Whatever a run writes is on the page."""
    known = [re.escape(name).replace("<>", r"\w+") for name in explained()]
    written = {name for record in records for name in record} - {"step", "time"}
    unknown = [name for name in written if not any(re.fullmatch(pattern, name) for pattern in known)]
    assert unknown == []


def check_tensorboard(run_dir: RunDir, steps: list[dict[str, float]]) -> None:
    for run, tag, name in (
        ("learner", "perf/step_s", "perf/step_s"),
        ("trained", "charts/success", "trained/success"),
        ("produced", "charts/success", "produced/success"),
    ):
        curve = points(run_dir.tensorboard / run, tag)
        told = [record for record in steps if name in record]
        assert [step for step, _ in curve] == [record["step"] for record in told]
        assert [value for _, value in curve] == pytest.approx([record[name] for record in told], rel=1e-5)
    learner = EventAccumulator(str(run_dir.tensorboard / "learner")).Reload()
    assert set(learner.PluginTagToContent("text")) == {"trained/best", "trained/worst", "trained/random"}
    alive = [value for _, value in points(run_dir.tensorboard / "fleet", "fleet/num_actors")]
    assert max(alive) >= 1, "by the clock"


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values of a chart; one with a description has tensors."""
    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0}).Reload()  # 0: all points
    if tag in events.Tags()["scalars"]:
        return [(point.step, point.value) for point in events.Scalars(tag)]
    return [(point.step, point.tensor_proto.float_val[0]) for point in events.Tensors(tag)]


def slipstream(arguments: list[str], *, mark: str, cwd: Path, **environment: str) -> str:
    """What `slipstream` prints in `cwd` with `arguments`. Fails the test with it when the exit code is not 0."""
    with subprocess.Popen(
        [sys.executable, "-P", *CLI, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, MARK: mark, **environment},
    ) as process:
        try:
            output, _ = process.communicate(timeout=UP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"slipstream {arguments[0]} did not end within {UP_TIMEOUT_S:.0f} s:\n{output}")
    assert process.returncode == 0, output
    return output
