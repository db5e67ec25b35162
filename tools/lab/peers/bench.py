"""`make bench-peers`: our modes, TRL and a loop by hand train one model on one task, and are measured side by side.

A cell is a run of an arm and a seed. All arms of a seed begin with the same weights, and run by turns. Every result is
a file; a cell with a result is not run again.
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
from typing import Any

import msgspec
import numpy as np

from slipstream.actors.engine.vllm_environment import CPU_ENVIRONMENT, vllm_environment
from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.common.process.shutdown import die_with_parent
from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.bench.benchmark import describe_machine, today
from slipstream.tools.lab.peers.meter import Meter
from slipstream.tools.lab.peers.results import (
    DROPPING,
    GOALS,
    OURS,
    SEEDS,
    SHARED,
    SUCCESS,
    TASK,
    Point,
    Result,
    spread_over_seeds,
    table,
)
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.lab.study.run import warm_start

BY_HAND = {"by hand": (), "by hand dropping": DROPPING}  # with settings
PEERS = (*BY_HAND, "trl", "trl refilled")
ARMS = ("default", "synchronous", "by hand", "trl", "trl refilled")  # where none are named
NUM_RANKS = 2  # of the loop by hand: one for each core
TRL_PYTHON = "build/peers-trl/bin/python"
ROOT = Path(__file__).resolve().parents[3]
MAX_CELL_S = 3600


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

    arm: str
    config: Config  # with the model that all arms of the seed begin with
    folder: Path
    settings: tuple[str, ...]  # what makes `config` of TASK
    trl_python: str

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def out(self) -> Path:
        """The file that a peer writes."""
        return self.folder / f"{self.name}.run.json"

    def commands(self) -> list[list[str]]:
        """The processes of the cell, which run together."""
        if self.arm in OURS:
            return [
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "slipstream.tools.cli.cli",
                    "up",
                    TASK,
                    *OURS[self.arm],
                    *self.settings,
                ]
            ]
        config = self.folder / f"{self.name}.yaml"
        write_whole(config, dump_config(self.config))
        files = [str(config), self.config.model.path, str(self.out)]
        if self.arm in BY_HAND:
            store = self.folder / f"{self.name}.store"
            store.unlink(missing_ok=True)  # of a run that was cut off
            peers = ["--num-ranks", str(NUM_RANKS), "--store", str(store)]
            command = [sys.executable, "-P", "-m", "slipstream.tools.lab.peers.by_hand", *files, *peers]
            return [[*command, "--rank", str(rank)] for rank in range(NUM_RANKS)]
        refill = ["--refill"] if self.arm == "trl refilled" else []
        return [[self.trl_python, "-P", "-m", "slipstream.tools.lab.peers.trl_grpo", *files, *refill]]


def run_cell(plan: Plan, *, seed: int) -> Cell:
    """Run a cell to its end, or return the result that it has. Raises CalledProcessError if a process of it fails."""
    path = plan.folder / f"{plan.name}.json"
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
    vllm = vllm_environment() | CPU_ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"} if plan.arm in BY_HAND else {}
    environment = {**os.environ, **vllm, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with (plan.folder / f"{plan.name}.log").open("wb") as log:
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
                    if process.wait(MAX_CELL_S):
                        raise subprocess.CalledProcessError(process.returncode, process.args)
        finally:
            for process in running:
                process.terminate()
                process.wait()


def _measured(plan: Plan, *, seed: int) -> tuple[float, float, Result]:
    """When the clock started, the greedy success of the first weights, and the result."""
    if plan.arm in OURS:
        run_dir = RunDir(plan.folder, plan.name)
        records: list[dict[str, Any]] = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        first = next(record for record in records if "perf/step_s" in record)
        greedy = [each["eval/success_greedy"] for each in records if SUCCESS in each and each["step"] == 0][-1]
        result = Result.of(run_dir, arm=plan.arm, seed=seed, cpu_seconds=0.0)
        return first["time"] - first["perf/step_s"], greedy, result
    run = json.loads(plan.out.read_text())
    points = msgspec.convert(run["points"], list[Point])
    result = Result(arm=plan.arm, seed=seed, points=points, trained_tokens=run["trained_tokens"], cpu_seconds=0.0)
    return run["started"], run["greedy"], result


def plan_of(arm: str, seed: int, *, folder: Path, steps: int | None, settings: Sequence[str], trl_python: str) -> Plan:
    """The plan of a cell, whose weights are made by the first cell of its seed."""
    own = (f"run.root={folder}", f"run.seed={seed}")
    warm = load_config(TASK, [*settings, *own, f"run.name=warm-seed{seed}"])
    ranks = join_ranks(timeout_s=60.0)
    try:
        model = warm_start(warm, ranks=ranks)
    finally:
        leave_ranks()
    name = f"run.name={arm.replace(' ', '_')}-seed{seed}"
    start = (f"model.path={model.resolve()}", "warm_start.episodes=0", *([f"learner.steps={steps}"] if steps else []))
    all_settings = (*SHARED, *BY_HAND.get(arm, ()), *settings, *own, *start, name)
    return Plan(
        arm=arm,
        config=load_config(TASK, list(all_settings)),
        folder=folder,
        settings=all_settings,
        trl_python=trl_python,
    )


def costs(cells: Sequence[Cell], arms: Sequence[str]) -> str:
    """In Markdown, the start of each arm, and the tokens, CPU seconds and memory that it needed."""
    rows = []
    for arm in arms:
        own = [cell for cell in cells if cell.result.arm == arm]
        if not own:
            continue
        row = [
            arm,
            spread_over_seeds([cell.result.points[0].success for cell in own], "{:.0%}"),
            spread_over_seeds([cell.greedy for cell in own], "{:.1%}"),
        ]
        for goal in GOALS:
            found = [cell.result.reached(goal) for cell in own]
            row.append(spread_over_seeds([point.tokens if point else None for point in found], "{:,.0f}"))
            row.append(spread_over_seeds([cell.cpu_until(goal) for cell in own], "{:.0f} s"))
        row.append(spread_over_seeds([max(point.success for point in cell.result.points) for cell in own], "{:.0%}"))
        row.append(spread_over_seeds([cell.peak_memory_bytes / 1e9 for cell in own], "{:.1f} GB"))
        rows.append(row)
    head = ["arm", "sampled at the start", "greedy at the start"]
    for goal in GOALS:
        head += [f"tokens to {goal:.0%}", f"CPU to {goal:.0%}"]
    return markdown([*head, "best", "peak memory"], rows)


def page_of(page: str, cells: Sequence[Cell], arms: Sequence[str], *, command: str) -> str:
    """The page with its two tables."""
    results = [cell.result for cell in cells]
    return with_table(page, f"{table(results, arms)}\n{costs(cells, arms)}\n`{command}`, {today()}.\n")


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, seed after seed, and write the page from all results."""
    parser = argparse.ArgumentParser(prog="bench_peers", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell")
    parser.add_argument("--arms", nargs="+", choices=[*OURS, *PEERS], default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="optimizer steps of every cell")
    parser.add_argument("--folder", type=Path, default=Path("build/bench_peers"), help="where results are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    parser.add_argument("--trl-python", default=TRL_PYTHON, help="the Python of the environment with TRL")
    options = parser.parse_intermixed_args(arguments)
    page, folder = options.docs / "peers.md", options.folder.resolve()
    text = page.read_text()  # before hours of runs
    folder.mkdir(parents=True, exist_ok=True)
    load_before, cells = os.getloadavg()[0], list[Cell]()
    for seed in options.seeds:
        for arm in options.arms:
            plan = plan_of(
                arm,
                seed,
                folder=folder,
                steps=options.steps,
                settings=options.settings,
                trl_python=options.trl_python,
            )
            cells.append(run_cell(plan, seed=seed))
            print(f"{arm}, seed {seed}: {cells[-1].result.points[-1]}", flush=True)
    machine = describe_machine(gpu="", versions={}, load_before=load_before)
    command = shlex.join(["python", "-P", "-m", "slipstream.tools.lab.peers.bench", *arguments])
    raw = {"command": command, "date": today(), "machine": machine, "cells": cells}
    write_whole(options.docs / "peers.json", json.dumps(msgspec.to_builtins(raw), indent=1) + "\n")
    write_whole(page, page_of(text, cells, options.arms, command=command))


if __name__ == "__main__":
    main(sys.argv[1:])
