"""A run without vLLM: the learner's own process, Redis, and an actor whose engine follows a script."""

import json
import math
import os
from pathlib import Path

import torch

from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, Run

NUM_STEPS = 3
READER_ENDS = """
import os, sys
if "slipstream.learner.model.reader" in sys.orig_argv: os._exit(1)
"""
SETTINGS = [
    *GUESS,
    f"learner.steps={NUM_STEPS}",
    "learner.checkpoint_every=2",
    "objective.guard=false",
    "objective.max_negative_kl=0",
]


def test_a_learner_on_a_device_trains_on_what_comes_over_redis_and_the_books_balance(
    redis_server: Server, run_id: str, tmp_path: Path, device: torch.device
) -> None:
    with Run(run_id, root=tmp_path, server=redis_server, settings=SETTINGS) as run:
        learner = run.start_learner()
        run.start_scripted_actor("actor")
        run.wait_until(lambda: learner.exit_code == 0, "the learner has finished the run")
        assert f" on {device.type}: " in learner.said()
        assert run.steps() == list(range(1, NUM_STEPS + 1))
        assert all(0 < record["optim/grad_norm"] < math.inf for record in run.step_records())
        assert run.audit() == []


def test_an_export_that_fails_its_check_ends_the_run_after_its_last_evaluation(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(READER_ENDS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = [*SETTINGS, "learner.steps=1", "eval.num_tasks=4"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        learner = run.start_learner(PYTHONPATH=path)
        run.start_scripted_actor("actor")
        assert learner.wait() != 0 and "does not load in a fresh process" in learner.said()
        summary = json.loads((tmp_path / run_id / "summary.json").read_text())
        assert summary["eval"]["final"]["num_tasks"] == 4
