"""What Redis counts as trained is covered by a checkpoint that is durable, also where the learner dies in between.

A real learner with a slow disk on a real server; the actor is a stand-in that plays nothing.
"""

import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from slipstream.common.process.connection import connect
from slipstream.replay.server.redis_server import Server
from tests.learner.checkpoint.test_checkpoint_kill import SLOW_DISK, kill_where, whole_checkpoints
from tests.processes import GUESS, PLAYED_BY_OTHERS, Run, customized, nothing_runs
from tests.replay.records.attempts import earning, make_buffer
from tests.waiting import beside

GROUPS_PER_STEP = 4
NUM_STEPS = 12
SETTINGS = [*GUESS, *PLAYED_BY_OTHERS, f"learner.steps={NUM_STEPS}"]
SETTINGS += ["replay.max_lag=1000", "learner.checkpoint_every=2"]


def stand_in(server: Server, run_id: str) -> AbstractContextManager[None]:
    """Every ticket is answered at once, by attempts that earn unlike rewards."""

    def play(leaving: threading.Event) -> None:
        with connect(server.secret_url) as client:
            buffer = make_buffer(client, run_id)
            while not leaving.wait(0.01):
                while lease := buffer.actor.lease("stand-in"):
                    for member in lease.missing:
                        attempt = buffer.attempt(lease, member, policy_version=lease.ticket.min_policy_version)
                        buffer.actor.insert(lease, earning(attempt, float(member % 2)))

    return beside(play)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_durable_step_is_settled_after_a_kill(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    with Run(run_id, root=tmp_path, server=redis_server, settings=SETTINGS) as run, stand_in(redis_server, run_id):

        def is_durable_and_not_settled() -> bool:
            trained = run.ledger().trained  # read first: what is settled was durable before
            newest = max(whole_checkpoints(run.dir), default=0)
            assert trained <= GROUPS_PER_STEP * newest
            return newest >= 4 and trained < GROUPS_PER_STEP * newest

        killed = run.start_learner(**customized(tmp_path))
        newest = kill_where(tmp_path, run_id, lambda _: is_durable_and_not_settled(), killed)
        assert 4 <= newest < NUM_STEPS
        resumed = run.start_learner()
        assert resumed.wait() == 0, resumed.last_words()
        assert f"resumed from step_{newest:06d}" in resumed.said()
        assert run.steps() == list(range(1, NUM_STEPS + 1))
        assert run.ledger().trained == GROUPS_PER_STEP * NUM_STEPS
        assert run.ledger().balanced and run.audit() == []
        run.wait_until(lambda: nothing_runs(run_id), "every process is gone", deadline_s=60)
