"""A host that its cloud takes away: a notice, a drain, and nothing is lost."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.replay.server.redis_server import Server
from slipstream.tools.see.view import View
from tests.actors.host.metadata_service import MetadataService
from tests.processes import GUESS, Gate, Run, nothing_runs

STANDSTILL_S = 1.0


@pytest.mark.timeout(600)
def test_a_host_that_gets_its_notice_hands_in_what_it_has_and_leaves(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """A learner, and a host of one actor; the gate holds every episode behind its first turn when the notice comes."""
    gate = Gate(tmp_path / "gate")
    settings = [
        *GUESS,
        f"env.options={{gate: {gate}, gate_turn: 1, step_s: 0.1}}",
        "env.step_timeout_s=600",
        "learner.steps=100000",
        "learner.checkpoint_every=100000",
        "actors.count=1",
        "actors.zone=eu-west-1a",
        "actors.instance_kind=spot",
        "actors.price_per_hour=0.25",
        "actors.drain_s=5",
    ]
    with MetadataService() as cloud, Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        cloud.wants_tokens()
        run.start_learner()
        host = run.start_host("actors.notices=aws", f"actors.notices_url={cloud.url}")
        run.wait_until(lambda: run.last_step() >= 2, "the second step")
        it_is_shown_with_what_it_is(run, redis_server)
        gate.close()
        stands_still_in_mid_episode(run)
        before = run.ledger()

        cloud.answers["/latest/meta-data/spot/instance-action"] = (
            200,
            '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}',
        )
        run.wait_until(
            lambda: run.ledger().leased > 0 and run.bulletin.broadcast_members() == [],
            "it leaves the broadcasts while its episodes continue",
        )
        assert host.wait() == EXIT_PREEMPTED
        assert "AWS will terminate this host at 2026-11-21T08:22:00Z" in host.said()
        after = run.ledger()
        assert before.leased > 0 == after.leased
        assert after.queued == before.queued + before.leased and after.expired_leases == before.expired_leases
        assert after.partials_handed_in > before.partials_handed_in and after.partials_held > 0
        assert after.balanced and run.audit() == []
        assert run.fleet.members() == [] and run.bulletin.broadcast_members() == []
        (gone,) = run.fleet.everyone()
        assert 0 < gone.kept_tokens <= gone.generated_tokens
        for process in run.processes:
            if process is not host:
                process.kill()
    assert nothing_runs(run_id)


def it_is_shown_with_what_it_is(run: Run, server: Server) -> None:
    (actor,) = run.fleet.members()
    assert actor.engine.startswith("vllm ") and actor.engine.endswith(" cpu")
    with connect(server.secret_url) as client:
        console = Console(file=io.StringIO(), width=200)
        console.print(View([client], run.dir, run.name, num_steps=100, max_lag=4).render())
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue().splitlines()
    assert "of 8" in next(line for line in shown if actor.name in line)
    where = next(line for line in shown if "runs on:" in line)
    for words in (actor.engine, "spot", "eu-west-1a", "0.25"):
        assert words in where


def stands_still_in_mid_episode(run: Run) -> None:
    """Behind the gate, wait until what was past it is over and the actor holds leases."""
    before: object = None
    since = time.monotonic()

    def stands_still() -> bool:
        nonlocal before, since
        now = (run.ledger().inserted, run.holders())
        if now != before:
            before, since = now, time.monotonic()
        return time.monotonic() - since > STANDSTILL_S and run.ledger().leased > 0

    run.wait_until(stands_still, "the actor is in mid-episode")
