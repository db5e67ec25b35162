"""Repeated tasks in a whole run: leased and counted as any other, and known again after the learner was killed."""

from pathlib import Path

from slipstream.learner.supply import mixed_tasks
from slipstream.replay.records.ledger import REPEATED
from slipstream.replay.server.server import Server
from tests.processes import GUESS, Run

ENV = "tests.guess:GuessEnv"


def test_repeats_are_counted_apart_and_known_after_a_restart(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    settings = [*GUESS, "env.repeat=0.75", "learner.steps=8", "learner.checkpoint_every=2", "eval.num_tasks=0"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        first, actor = run.start_learner(), run.start_actor("actor")
        run.wait_until(lambda: run.last_step() >= 5, "the fifth step")
        first.kill()
        assert ENV in mixed_tasks.load(run.dir.mixed_tasks(0))
        second = run.start_learner()
        assert (second.wait(), actor.wait()) == (0, 0)
        ledger = run.ledger()
        assert ledger.balanced and run.audit() == []
        assert ledger.episodes[ENV] > 0 and ledger.episodes[ENV + REPEATED] > 0
        assert sum(ledger.episodes.values()) == ledger.inserted
        newest = run.step_records()[-1]
        assert 0 <= newest["produced/new_episodes"] <= newest["produced/episodes"]
