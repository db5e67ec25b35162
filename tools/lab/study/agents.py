"""`make study-agents`: train agents on OpenAI's SDK and on other frameworks, unchanged, while an actor is killed.

Each arm is one `slipstream up` in the environment of its framework, on vLLM. The agents are in tests/adapters/agents.
They shop in the quickstart's shop by calls of a tool, which vLLM's parser reads. All begin with one tiny model that
imitates the shop's expert, whose actions are written as calls.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from slipstream.common.config.config import load_config
from slipstream.common.process.headline import wilson
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.common.records.trajectory import LogprobArray, Task, Trajectory
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_model
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.replay.run.archive import Archive
from slipstream.tools.lab.study.run import warm_start
from slipstream.tools.lab.study.task import TASK
from slipstream.tools.lab.study.tiny_caller import CLOSING, OPENING, make_tiny_caller
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.terminal.table import print_rows

AGENTS = Path("tests/adapters/agents")
# The interpreter of each arm, and its agent.
ARMS: dict[str, tuple[str, Any]] = {
    "openai": (sys.executable, f"{'.'.join(AGENTS.parts)}.shop_openai:play"),
    "agents": ("build/adapters-agents/bin/python", f"{'.'.join(AGENTS.parts)}.shop_agents:play"),
    "langgraph": ("build/adapters-langgraph/bin/python", f"{'.'.join(AGENTS.parts)}.shop_langgraph:play"),
    "command": (sys.executable, ["/usr/bin/python3", "/opt/agent/search.py"]),
}
STEPS, HELD_OUT_TASKS, COMMAND_TASKS = 45, 100, 2000
COMMAND_STEPS = 15  # it chooses one search only, which the first weights do well; each episode starts two processes
KILL_AT_STEP = 5
TOLERANCE = 1e-3  # nats
MAX_GROUP_BYTES = 1 << 28
FLOAT32 = ModelSettings(dtype="float32", temperature=1.0, chunk_tokens=1024)


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm; rates are of held-out tasks, sampled."""

    arm: str
    steps: int
    tasks: int
    success_before: float
    success: float
    num_compared: int  # sampled tokens of the first weights, in step 1
    worst_difference: float  # nats between their recorded log-probabilities and those that the learner computes
    trajectories: int
    expired_leases: int  # those of the killed actor among them
    balanced: bool
    wall_s: float


def main(arguments: Sequence[str]) -> int:
    """Run the arms that have no result, and print all; return 1 if a ledger is not balanced, or an agent no better."""
    options = _parsed(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    results, ranks = [], join_ranks(timeout_s=60)
    for arm in options.arms:
        file = options.folder / f"{arm}.json"
        if not file.exists() or msgspec.json.decode(file.read_bytes(), type=Result).steps < _steps(arm):
            model = _caller(options.folder, ranks)
            run_dir = _trained(arm, model, options.folder, options.settings)
            result = _result(arm, run_dir, load_model(model, ranks=ranks, settings=FLOAT32))
            write_whole(file, msgspec.json.encode(result).decode())
        results.append(msgspec.json.decode(file.read_bytes(), type=Result))
    head = [
        "agent",
        "steps",
        "success before",
        "after",
        "log-probabilities",
        "trajectories",
        "expired",
        "ledger",
        "time",
    ]
    print_rows(head, [_row(result) for result in results])
    return 0 if all(map(_holds, results)) else 1


def _steps(arm: str) -> int:
    return COMMAND_STEPS if arm == "command" else STEPS


def _holds(result: Result) -> bool:
    return result.balanced and result.success > result.success_before and result.worst_difference < TOLERANCE


def _row(result: Result) -> list[str]:
    def rate(success: float) -> str:
        low, high = wilson(success, result.tasks)
        return f"{success:.1%} ({low:.0%} to {high:.0%})"

    return [
        result.arm,
        str(result.steps),
        rate(result.success_before),
        rate(result.success),
        f"{result.num_compared} within {result.worst_difference:.1e}",
        str(result.trajectories),
        str(result.expired_leases),
        "balanced" if result.balanced else "NOT BALANCED",
        f"{result.wall_s:.0f} s",
    ]


def _caller(folder: Path, ranks: Ranks) -> Path:
    """The folder of the tiny model that calls the tool; the first call makes and trains it."""
    started, calls = folder / "model", {"write": f"{OPENING}{{action}}{CLOSING}", "instructions": ""}
    if not started.exists():
        quickstart, half = load_config(TASK, []), folder / "model.tmp"
        texts = vocabulary_texts(quickstart.env, quickstart.model.tiny.num_tasks)
        make_tiny_caller(half, texts=texts, config=quickstart.model.tiny, max_tokens=quickstart.model.max_tokens)
        half.rename(started)
    config = load_config(
        TASK,
        [f"run.root={folder.resolve()}", "run.name=caller", f"model.path={started}"],
        presets=[{"env": {"action_format": "call", "formats": {"call": calls}}}],
    )
    return warm_start(config, ranks=ranks).resolve()


def _trained(arm: str, model: Path, folder: Path, settings: Sequence[str]) -> RunDir:
    """Run the arm, and kill one of its actors in the middle; one that was stopped, or has fewer steps, continues."""
    python, agent = ARMS[arm]
    options = {"agent": agent}
    if arm == "command":
        options |= {"folder": str(AGENTS.resolve())} | asyncio.run(_rows(folder))
    preset = folder / f"{arm}.yaml"
    preset.write_text(json.dumps({"env": {"name": "agent", "options": options}}))
    run_dir = RunDir(str(folder.resolve()), arm)
    command = [
        python,
        "-P",
        "-m",
        "slipstream.tools.cli.cli",
        "up",
        f"run.root={folder.resolve()}",
        f"learner.steps={_steps(arm)}",
    ]
    if run_dir.config.exists():
        command += ["--resume", arm]
    else:
        command += [
            *(TASK, str(preset), f"run.name={arm}", f"model.path={model}", "model.tool_parser=hermes"),
            *("warm_start.episodes=0", "objective.advantage=group_standardised", f"eval.num_tasks={HELD_OUT_TASKS}"),
            *settings,
        ]
    is_struck = _last_step(run_dir) >= KILL_AT_STEP
    up = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    try:
        while _last_step(run_dir) < KILL_AT_STEP and up.poll() is None:
            time.sleep(0.2)
        if up.poll() is None and not is_struck:
            _an_actor(up.pid).kill()
        if up.wait():
            raise SystemExit(f"`slipstream up` of {arm} ended with exit code {up.returncode}; see {run_dir.log('*')}")
    finally:
        up.terminate()
    return run_dir


def _result(arm: str, run_dir: RunDir, model: PackedModel) -> Result:
    """What the run has come to; `model` has its first weights."""
    summary = json.loads(run_dir.summary.read_text())
    before, after, ledger = summary["eval"]["initial"], summary["eval"]["final"], summary["ledger"]
    differences = np.concatenate([_differences(trajectory, model) for trajectory in _of_first_weights(run_dir, model)])
    return Result(
        arm=arm,
        steps=_last_step(run_dir),
        tasks=after["num_tasks"],
        success_before=before["sampled"],
        success=after["sampled"],
        num_compared=len(differences),
        worst_difference=float(differences.max()),
        trajectories=ledger["inserted"],
        expired_leases=ledger["expired_leases"],
        balanced=ledger["balanced"],
        wall_s=summary["wall_s"],
    )


def _of_first_weights(run_dir: RunDir, model: PackedModel) -> list[Trajectory]:
    """The trajectories of step 1 that the first weights have sampled."""
    archive = Archive(run_dir.trajectories, run_dir.path.name)
    step = archive.read(1, vocab_size=model.vocab_size, max_group_bytes=MAX_GROUP_BYTES)
    trajectories = [trajectory for group in step.groups for trajectory in group.trajectories]
    return [each for each in trajectories if each.newest_policy_version == step.policy_version]


def _differences(trajectory: Trajectory, model: PackedModel) -> LogprobArray:
    """How far the recorded log-probability of each sampled token is from what the learner computes."""
    with torch.no_grad():  # each branch by itself: a pack would sort them
        found = [model(pack([sequence])).logprobs for sequence in sequences_of(trajectory, advantage=0.0)]
    recorded = trajectory.behaviour_logprob_array()[trajectory.loss_mask_array()]
    return np.abs(torch.cat(found).numpy() - recorded)


async def _rows(folder: Path) -> dict[str, str]:
    """Write the tasks of the command: the shop's instructions, and the first search of its expert."""
    files = {}
    for split, num_tasks in (("train", COMMAND_TASKS), ("held_out", HELD_OUT_TASKS)):
        lines, shop = [], ShopEnv(profile="small")
        for index in range(num_tasks):
            seen = await shop.reset(Task(env="shop", split=split, index=index))
            lines.append(json.dumps({"question": seen.messages[-1].content, "answer": shop.expert()}))
        path = folder / f"{split}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        files[split] = str(path.resolve())
    return files


def _last_step(run_dir: RunDir) -> int:
    return max((int(record["step"]) for record in read_metrics(run_dir.metrics)), default=0)


def _an_actor(up: int) -> psutil.Process:
    """One of the run's actors: `python -m slipstream.actors`."""
    children = psutil.Process(up).children(recursive=True)
    return next(child for child in children if "slipstream.actors" in child.cmdline())


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="study_agents", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every arm")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--folder", type=Path, default=Path("build/study_agents"), help="where runs are written")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
