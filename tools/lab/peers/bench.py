"""`make bench-peers` and `make bench-real`: our modes, TRL and a loop by hand train one model on one task, by turns.

A cell is a run of an arm and a seed. All arms of a seed begin with the same weights. Every result is a file; a cell
with a result is not run again, and is in the table. `ARM@RATE`, such as `trl@3e-6`, is an arm with
another learning rate.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.actors.engine.vllm_environment import CPU_ENVIRONMENT, vllm_environment
from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.output import write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import die_with_parent
from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.bench.benchmark import describe_machine, today, with_text
from slipstream.tools.lab.peers.meter import Meter
from slipstream.tools.lab.peers.results import SEEDS, SUCCESS, Point, Result, smoothed, spread_over_seeds
from slipstream.tools.lab.study import plot
from slipstream.tools.lab.study.page import markdown
from slipstream.tools.lab.study.run import warm_start


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """A task on which the arms are compared."""

    config: str
    settings: tuple[str, ...]  # of every arm
    goals: tuple[float, ...]
    page: str  # in docs
    json: str  # in docs
    mark: str  # of the table in the page


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """What learns, and how it differs from its defaults."""

    kind: Literal["ours", "by hand", "trl"] = "ours"
    settings: tuple[str, ...] = ()
    trl: dict[str, Any] = {}  # fields of TRL's GRPOConfig
    threads: int = 1  # of our learner


BENCHES = {
    "shop": Bench(
        config="conf/quickstart.yaml",
        settings=("eval.every=20", "eval.num_tasks=200"),
        goals=(0.8, 0.88),
        page="studies/peers.md",
        json="studies/peers.json",
        mark="results",
    )
} | {
    task: Bench(
        config=f"conf/{task}_smollm2.yaml",
        settings=("eval.every=0", "eval.num_tasks=64"),  # so points are of fresh episodes
        goals=(0.3, 0.5, 0.8),
        page="benchmarks.md",
        json=f"studies/real_{task}.json",
        mark=f"real {task}",
    )
    for task in ("sums", "guess")
}
ALL_GROUPS = ("replay.drop_zero_variance=false",)  # as TRL
ON_POLICY = ("replay.target_lag=0", "replay.max_lag=0")
UNMASKED = ("objective.correction=none", "objective.max_negative_kl=0", "objective.guard=false")
ARMS = {
    "default": Arm(),
    "bfloat16": Arm(settings=("model.dtype=bfloat16",)),
    "two threads": Arm(threads=2),
    "all groups": Arm(settings=ALL_GROUPS),
    "synchronous": Arm(settings=(*ALL_GROUPS, *ON_POLICY)),
    "synchronous dropping": Arm(settings=ON_POLICY),
    "lag 1": Arm(settings=(*ALL_GROUPS, "replay.target_lag=1")),
    "unmasked": Arm(settings=(*ALL_GROUPS, *UNMASKED)),
    "sequences": Arm(settings=(*ALL_GROUPS, "objective.normalisation=sequences")),
    "clip 0.2": Arm(settings=(*ALL_GROUPS, "objective.clip_high=0.2")),
    "by hand": Arm(kind="by hand", settings=ALL_GROUPS),
    "by hand dropping": Arm(kind="by hand", settings=("replay.drop_zero_variance=true",)),
    "trl": Arm(kind="trl", settings=ALL_GROUPS),
    "trl bfloat16": Arm(kind="trl", settings=ALL_GROUPS, trl={"bf16": True}),
    "trl sequences": Arm(kind="trl", settings=ALL_GROUPS, trl={"loss_type": "grpo"}),
    "trl beta2 0.999": Arm(kind="trl", settings=ALL_GROUPS, trl={"adam_beta2": 0.999}),
}
RATES = ("3e-6", "1e-5", "3e-5")
OUR_BEST = ("default", "bfloat16", "two threads")
SETS = {  # of arms, for --arms
    "equal": ("all groups", "synchronous", "by hand", "trl"),
    "best": tuple(f"{arm}@{rate}" for arm in (*OUR_BEST, "by hand dropping", "trl", "trl bfloat16") for rate in RATES),
    "factors": (
        *("synchronous", "lag 1", "all groups", "default", "synchronous dropping", "unmasked", "sequences", "clip 0.2"),
        *("trl", "trl sequences", "trl beta2 0.999"),
    ),
}
NUM_RANKS = 2  # of the loop by hand: one for each core
TRL_PYTHON = "build/peers-trl/bin/python"
ROOT = Path(__file__).resolve().parents[3]
MAX_CELL_S = 2 * 3600


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of an arm and a seed."""

    result: Result  # its CPU seconds are those since the clock started
    greedy: float  # held-out success of the first weights, greedily
    cpu_seconds: list[float]  # at each point, since the clock started
    peak_memory_bytes: int  # of all processes together, from their start
    load_before: float  # the load average of the minute before

    def cpu_until(self, goal: float) -> float | None:
        """The CPU seconds until `goal` was reached; None if it never was."""
        found = self.result.reached(goal)
        if found is None:
            return None
        return float(np.interp(found.seconds, [point.seconds for point in self.result.points], self.cpu_seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to run a cell."""

    name: str  # of the arm
    arm: Arm
    bench: Bench
    config: Config  # with the model that all arms of the seed begin with
    folder: Path
    settings: tuple[str, ...]  # what makes `config` of the bench's
    trl_python: str

    def file(self, ending: str) -> Path:
        """A file of the cell; a peer writes `run.json`."""
        return self.folder / f"{self.config.run.name}.{ending}"

    def commands(self) -> list[list[str]]:
        """The processes of the cell, which run together."""
        ours = [sys.executable, "-P", "-m"]
        if self.arm.kind == "ours":
            return [[*ours, "slipstream.tools.cli.cli", "up", self.bench.config, *self.settings]]
        write_whole(self.file("yaml"), dump_config(self.config))
        files = [str(self.file("yaml")), self.config.model.path, str(self.file("run.json"))]
        if self.arm.kind == "by hand":
            self.file("store").unlink(missing_ok=True)  # of a run that was cut off
            peers = ["--num-ranks", str(NUM_RANKS), "--store", str(self.file("store"))]
            command = [*ours, "slipstream.tools.lab.peers.by_hand", *files, *peers]
            return [[*command, "--rank", str(rank)] for rank in range(NUM_RANKS)]
        changes = ["--changes", json.dumps(self.arm.trl)]
        return [[self.trl_python, "-P", "-m", "slipstream.tools.lab.peers.trl_grpo", *files, *changes]]


def run_cell(plan: Plan, *, seed: int) -> Cell:
    """Run a cell to its end, or return the result that it has. Raises RuntimeError if a process of it fails."""
    path = plan.file("json")
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Cell)
    load_before, meter = os.getloadavg()[0], Meter()
    _run_all(plan, meter)
    started, greedy, result = _measured(plan, seed=seed)
    cpu_seconds = [meter.cpu_between(started, started + point.seconds) for point in result.points]
    cell = Cell(
        result=msgspec.structs.replace(result, cpu_seconds=cpu_seconds[-1]),
        greedy=greedy,
        cpu_seconds=cpu_seconds,
        peak_memory_bytes=meter.peak_memory_bytes,
        load_before=load_before,
    )
    write_whole(path, msgspec.json.encode(cell).decode())
    return cell


def _run_all(plan: Plan, meter: Meter) -> None:
    own = {"OMP_NUM_THREADS": str(plan.arm.threads)}
    if plan.arm.kind == "by hand":
        own = vllm_environment() | CPU_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with plan.file("log").open("wb") as log:
        start = partial(
            subprocess.Popen,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=ROOT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        running = [start(command) for command in plan.commands()]
        try:
            with meter.on([process.pid for process in running]):
                for process in running:
                    if code := process.wait(MAX_CELL_S):
                        raise RuntimeError(f"{plan.config.run.name} ended with code {code}; see {plan.file('log')}")
        finally:
            for process in running:
                process.terminate()
                process.wait()


def _measured(plan: Plan, *, seed: int) -> tuple[float, float, Result]:
    """When the clock started, the greedy success of the first weights, and the result."""
    fresh = plan.config.eval.every == 0
    if plan.arm.kind == "ours":
        run_dir = RunDir(plan.folder, plan.config.run.name)
        records: list[dict[str, Any]] = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        first = next(record for record in records if "perf/step_s" in record)
        greedy = [each["eval/success_greedy"] for each in records if SUCCESS in each and each["step"] == 0][-1]
        result = Result.of(run_dir, arm=plan.name, seed=seed, fresh=fresh)
        return first["time"] - first["perf/step_s"], greedy, result
    run = json.loads(plan.file("run.json").read_text())
    points = msgspec.convert(run["points"], list[Point])
    result = Result(
        arm=plan.name,
        seed=seed,
        points=smoothed(points) if fresh else points,
        trained_tokens=run["trained_tokens"],
        cpu_seconds=0.0,
    )
    return run["started"], run["greedy"], result


def plan_of(
    name: str, seed: int, *, bench: Bench, folder: Path, steps: int | None, settings: Sequence[str], trl_python: str
) -> Plan:
    """The plan of a cell; weights that a warm start makes are made by the first cell of its seed."""
    base, _, rate = name.partition("@")
    own = (f"run.root={folder}", f"run.seed={seed}")
    warm = load_config(bench.config, [*settings, *own, f"run.name=warm-seed{seed}"])
    start = [f"learner.steps={steps}"] if steps else []
    if warm.model.path:
        start.append(f"model.path={Path(warm.model.path).resolve()}")
    else:
        ranks = join_ranks(timeout_s=60.0)
        try:
            start += [f"model.path={warm_start(warm, ranks=ranks).resolve()}", "warm_start.episodes=0"]
        finally:
            leave_ranks()
    rates = (f"optim.lr={rate}",) if rate else ()
    label = f"run.name={name.replace(' ', '_').replace('@', '_at_')}-seed{seed}"
    all_settings = (*bench.settings, *ARMS[base].settings, *rates, *settings, *own, *start, label)
    return Plan(
        name=name,
        arm=ARMS[base],
        bench=bench,
        config=load_config(bench.config, list(all_settings)),
        folder=folder,
        settings=all_settings,
        trl_python=trl_python,
    )


def table(cells: Sequence[Cell], arms: Sequence[str], *, goals: Sequence[float]) -> str:
    """In Markdown, what each arm needed: means over the seeds that reached a goal, with each seed in brackets.

    A goal that no cell reached is left out.
    """
    goals = [goal for goal in goals if any(cell.result.reached(goal) for cell in cells)]
    rows = []
    for arm in arms:
        own = [cell for cell in cells if cell.result.arm == arm]
        if not own:
            continue
        last = [cell.result.points[-1] for cell in own]
        row = [arm, spread_over_seeds([cell.greedy for cell in own], "{:.1%}")]
        for goal in goals:
            found = [cell.result.reached(goal) for cell in own]
            row.append(spread_over_seeds([point.seconds if point else None for point in found], "{:.0f} s"))
            row.append(spread_over_seeds([point.step if point else None for point in found], "{:.0f}"))
            row.append(spread_over_seeds([point.tokens if point else None for point in found], "{:,.0f}"))
            row.append(spread_over_seeds([cell.cpu_until(goal) for cell in own], "{:.0f} s"))
        row.append(spread_over_seeds([point.success for point in last], "{:.0%}"))
        row.append(spread_over_seeds([max(point.success for point in cell.result.points) for cell in own], "{:.0%}"))
        row.append(spread_over_seeds([point.seconds / point.step for point in last], "{:.2f} s"))
        row.append(
            spread_over_seeds([cell.result.trained_tokens / cell.result.points[-1].tokens for cell in own], "{:.2f}")
        )
        row.append(spread_over_seeds([cell.peak_memory_bytes / 1e9 for cell in own], "{:.1f} GB"))
        rows.append(row)
    head = ["arm", "greedy at the start"]
    for goal in goals:
        head += [f"{what} to {goal:.0%}" for what in ("time", "steps", "tokens", "CPU")]
    return markdown([*head, "at the end", "best", "a step", "trained ÷ finished tokens", "peak memory"], rows)


def picture(cells: Sequence[Cell]) -> str:
    """The success of each cell, every minute."""
    lines = []
    for cell in cells:
        points = cell.result.points
        minutes = range(int(points[-1].seconds) // 60 + 1)
        found = np.interp(minutes, [point.seconds / 60 for point in points], [point.success for point in points])
        marks = [plot.Point(column=at, value=float(success), deviation=0.0) for at, success in enumerate(found)]
        lines.append(plot.Line(name=f"{cell.result.arm}, seed {cell.result.seed}", points=marks))
    columns = [str(at) for at in range(max(len(line.points) for line in lines))]
    return plot.svg(lines, columns=columns, across="minutes", upwards="success of fresh episodes")


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, seed after seed, and write the page from all results."""
    parser = argparse.ArgumentParser(prog="bench_peers", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell")
    parser.add_argument("--task", choices=BENCHES, default="shop")
    parser.add_argument("--arms", nargs="+", default=["equal"], help=f"{', '.join(ARMS)}; sets: {', '.join(SETS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="optimizer steps of every cell")
    parser.add_argument("--folder", type=Path, default=Path("build/bench_peers"), help="where results are written")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the page is written")
    parser.add_argument("--trl-python", default=TRL_PYTHON, help="the Python of the environment with TRL")
    options = parser.parse_intermixed_args(arguments)
    arms = [arm for named in options.arms for arm in SETS.get(named, (named,))]
    if unknown := [arm for arm in arms if arm.partition("@")[0] not in ARMS]:
        parser.error(f"unknown arms {', '.join(unknown)}; there are {', '.join([*ARMS, *SETS])}")
    bench = BENCHES[options.task]
    page, folder = options.docs / bench.page, options.folder.resolve() / options.task
    text = page.read_text()  # before hours of runs
    folder.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    for seed in options.seeds:
        for arm in arms:
            plan = plan_of(
                arm,
                seed,
                bench=bench,
                folder=folder,
                steps=options.steps,
                settings=options.settings,
                trl_python=options.trl_python,
            )
            print(f"{arm}, seed {seed}: {run_cell(plan, seed=seed).result.points[-1]}", flush=True)
    cells = [msgspec.json.decode(file.read_bytes(), type=Cell) for file in sorted(folder.glob("*-seed[0-9].json"))]
    arms = list(dict.fromkeys([*arms, *(cell.result.arm for cell in cells)]))
    machine = describe_machine(gpu="", versions={}, load_before=load_before)
    command = shlex.join(["python", "-P", "-m", "slipstream.tools.lab.peers.bench", *arguments])
    raw = {"command": command, "date": today(), "machine": machine, "cells": cells}
    write_whole(options.docs / bench.json, json.dumps(msgspec.to_builtins(raw), indent=1) + "\n")
    write_whole((options.docs / bench.json).with_suffix(".svg"), picture(cells))
    results = f"{table(cells, arms, goals=bench.goals)}\n`{command}`, {today()}.\n"
    write_whole(page, with_text(text, bench.mark, results))


if __name__ == "__main__":
    main(sys.argv[1:])
