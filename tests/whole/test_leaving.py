"""Processes that are asked to end while Redis is away."""

import contextlib
import signal
import time
from pathlib import Path

import pytest

from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.learner.checkpoint.checkpoint import latest_checkpoint
from slipstream.tools.lab.loopback_server import start_server
from tests.processes import GUESS, Run

SOON_S = 60.0  # a client that waited with all its patience would take twice as long


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP])
def test_a_learner_and_an_actor_leave_soon_and_in_order(fault: signal.Signals, run_id: str, tmp_path: Path) -> None:
    settings = [*GUESS, "env.options={step_s: 0.1}", "learner.steps=100000", "learner.checkpoint_every=100000"]
    with (
        start_server(tmp_path / "redis") as server,
        Run(run_id, root=tmp_path, server=server, settings=[*settings, "actors.drain_s=1"]) as run,
        contextlib.ExitStack() as stack,
    ):
        learner, actor = run.start_learner(), run.start_actor("actor")
        run.wait_until(lambda: run.last_step() >= 2, "the second step")
        stack.callback(server.process.send_signal, signal.SIGCONT)  # so that it can be ended
        server.process.send_signal(fault)
        log = run.dir.log("test-learner")
        run.wait_until(lambda: "has not answered since" in log.read_text(), "the learner waits for Redis")
        step, told = run.last_step(), time.monotonic()
        for process in (learner, actor):
            process.send(signal.SIGTERM)
        assert actor.wait(SOON_S) == EXIT_PREEMPTED
        assert learner.wait(SOON_S) == EXIT_PREEMPTED, learner.last_words()
        assert time.monotonic() - told < SOON_S
        newest = latest_checkpoint(run.dir.checkpoints)
        assert newest is not None and newest.name == f"step_{step:06d}"
