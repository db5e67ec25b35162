"""Hosts that share nothing with the learner join by the printed command, are cut off, and are taken away."""

import io
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from common.connection import PASSWORD_VARIABLE
from common.shutdown import EXIT_PREEMPTED
from replay.server import Server
from tests.bare_host import BareHost
from tests.processes import GUESS, MARK, REPOSITORY, Run

JOIN_S = 180.0


def printed_command(run: Run, *settings: str) -> str:
    """What `slipstream join-command` prints on the learner's host."""
    arguments = [f"run.name={run.name}", f"run.root={run.dir.path.parent}", *settings]
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", "join-command", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (command,) = done.stdout.splitlines()
    return command


@pytest.mark.timeout(900)
def test_a_host_that_shares_nothing_joins_plays_is_cut_off_returns_and_leaves_and_another_takes_over(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    settings = [
        *GUESS,
        "env.options={step_s: 0.05}",
        "learner.steps=100000",
        "learner.checkpoint_every=100000",
        "replay.lease_ttl_s=4",
        "replay.max_attempts=100",
        "actors.count=1",
        "actors.drain_s=2",
    ]
    variables = {PASSWORD_VARIABLE: redis_server.password, MARK: run_id}

    def host(name: str) -> BareHost:
        made = BareHost(name, tmp_path / "hosts", hidden=tmp_path / "runs", variables=variables)
        made.link(redis_server.port)
        made.link(int(run.bulletin.latest().pull_endpoint.rpartition(":")[2]))
        return made

    with Run(run_id, root=tmp_path / "runs", server=redis_server, settings=settings) as run:
        run.start_learner()
        run.wait_until(lambda: run.published_version() >= 0, "the first version")
        command = printed_command(run)
        assert redis_server.password not in command
        with host("spot-1") as first:
            first.start(f"ls -A {shlex.quote(str(tmp_path))} $HOME; {command}")
            run.wait_until(lambda: first.exit_code is not None or run.last_step() >= 2, "steps of what it plays")
            print(first.said())
            assert first.exit_code is None, first.said()
            first.preempt()
            assert first.wait(60) == EXIT_PREEMPTED
            print(first.said())
