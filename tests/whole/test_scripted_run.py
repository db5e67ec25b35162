"""A run without vLLM: the learner's own process, Redis, and an actor whose engine follows a script."""

import json
import math
from pathlib import Path

import pytest
import torch

from slipstream.replay.server.redis_server import Server
from slipstream.tools.cli.cli import main
from tests.processes import GUESS, PLAYED_BY_OTHERS, Run, customized

NUM_STEPS = 20
READER_ENDS = """
import os, sys
if "slipstream.learner.model.reader" in sys.orig_argv: os._exit(1)
"""
SETTINGS = [*GUESS, *PLAYED_BY_OTHERS, f"learner.steps={NUM_STEPS}", "learner.checkpoint_every=2"]


def test_a_run_trains_on_what_comes_over_redis_its_books_balance_and_it_can_be_simulated(
    redis_server: Server, run_id: str, tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(run_id, root=tmp_path, server=redis_server, settings=SETTINGS) as run:
        learner = run.start_learner()
        run.start_scripted_actor("actor")
        run.wait_until(lambda: learner.exit_code == 0, "the learner has finished the run")
        assert f" on {device.type}: " in learner.said()
        assert run.steps() == list(range(1, NUM_STEPS + 1))
        assert all(0 < record["optim/grad_norm"] < math.inf for record in run.step_records())
        assert run.audit() == []
    assert main(["simulate", f"run.name={run_id}", f"run.root={tmp_path}", "--actors", "1,2"]) == 0
    said = capsys.readouterr().out
    assert "1 actors, " in said and [line.split()[0] for line in said.splitlines()[-2:]] == ["1", "2"]


def test_an_export_that_fails_its_check_ends_the_run_after_its_last_evaluation(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(READER_ENDS)
    settings = [*SETTINGS, "learner.steps=1", "eval.num_tasks=4"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        learner = run.start_learner(**customized(tmp_path))
        run.start_scripted_actor("actor")
        assert learner.wait() != 0 and "does not load in a fresh process" in learner.said()
        summary = json.loads((tmp_path / run_id / "summary.json").read_text())
        assert summary["eval"]["final"]["num_tasks"] == 4
