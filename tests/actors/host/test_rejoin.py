"""A learner that comes back with other settings: actors that are still there join again, and no group is lost."""

import signal
from functools import partial
from pathlib import Path

import msgspec
import pytest
import redis

from slipstream.actors.__main__ import StartEngine, main
from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.host.beat import LastKnown, RunChanged
from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import EXIT_PREEMPTED, Shutdown
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.model_folder import ModelFile
from slipstream.replay.fleet.fleet import Fleet, RunFacts, RunState
from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, Process, Run
from tests.replay.buffer.every_verb import FACTS

DEADLINE_S = 600.0


def facts_of(*settings: str) -> RunFacts:
    given = dump_config(load_config(None, list(settings)))
    return msgspec.structs.replace(FACTS, config_yaml=given, own_modules={"ours": "digest"}, vocab_size=123)


PLAYED_BY = ["run.seed=5", "model.max_tokens=77", "env.max_turns=3", "env.options={profile: full}"]
PLAYED_BY += ["sampling.max_turn_tokens=9", "sampling.temperature=0.5", "replay.lease_ttl_s=99"]
OTHERS = ["run.root=/elsewhere", "learner.steps=9", "learner.ranks=2", "optim.lr=1.0", "objective.clip_high=0.3"]
OTHERS += ["eval.every=7", "actors.count=3", "weights.host=10.0.0.9", "warm_start.episodes=3"]


def test_actors_play_by_some_settings_and_stay_when_others_change() -> None:
    before = facts_of().play_root()
    assert [setting for setting in PLAYED_BY if facts_of(setting).play_root() == before] == []
    assert [setting for setting in OTHERS if facts_of(setting).play_root() != before] == []


def test_facts_beside_the_settings_count_but_the_folder_on_the_learners_host() -> None:
    facts, file = facts_of(), ModelFile(name="config.json", blob=Blob(root="0" * 32, num_bytes=1))
    changes = ({"vocab_size": 124}, {"tokenizer_root": "x"}, {"own_modules": {"ours": "x"}}, {"model_files": [file]})
    others = [msgspec.structs.replace(facts, **change) for change in changes]
    assert len({each.play_root() for each in [facts, *others]}) == 5
    assert msgspec.structs.replace(facts, model_path="/elsewhere").play_root() == facts.play_root()


def test_an_actor_whose_engine_dies_soon_is_started_again(shutdown: Shutdown, caplog: pytest.LogCaptureFixture) -> None:
    def begin() -> StartEngine:
        raise EngineDied("the engine process ended with exit code -9")

    assert main("a", ["redis.url=redis://127.0.0.1:9"], begin) == 1
    assert "its supervisor starts another one: the engine process ended with exit code -9" in caplog.text


def test_an_actor_whose_redis_is_away_is_started_again_and_says_which_and_what_to_do(
    shutdown: Shutdown, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.actors.__main__.connect", partial(connect, patience_s=0.1))
    assert main("a", ["redis.url=redis://127.0.0.1:9"], lambda: pytest.fail) == 1
    assert "Redis at redis://127.0.0.1:9 has not answered for 0 s: " in caplog.text
    assert "; start that server, or correct `redis.url`" in caplog.text


def test_an_actor_notices_at_its_next_beat(redis_client: redis.Redis, run_id: str) -> None:
    fleet, actors = Fleet(redis_client, run_id), Fleet(redis_client, run_id)
    fleet.describe_run(facts_of())
    fleet.set_run_state(RunState.TRAINING)
    mine, anyones = (LastKnown(actors, 60.0, play_root=root) for root in (facts_of().play_root(), ""))
    assert mine.state() is anyones.state() is RunState.TRAINING
    fleet.describe_run(facts_of("learner.steps=9"))
    fleet.set_run_state(RunState.STARTING)
    assert mine.state() is RunState.STARTING
    fleet.describe_run(facts_of("env.max_turns=3"))
    for state in (RunState.STARTING, RunState.TRAINING):
        fleet.set_run_state(state)
        with pytest.raises(RunChanged):
            mine.state()
        assert anyones.state() is state
    fleet.set_run_state(RunState.FINISHED)
    assert mine.state() is RunState.FINISHED


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE_S)
def test_the_actors_of_a_host_join_again_only_if_they_must(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    settings = [*GUESS, "learner.steps=100000", "learner.checkpoint_every=1", "actors.count=1", "actors.drain_s=1"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        learner = run.start_learner()
        host = run.start_host()
        trains_on(run)
        first = actor_names(run)
        learner = comes_back(run, learner, "optim.lr=0.0001")
        trains_on(run)
        assert actor_names(run) == first
        learner = comes_back(run, learner, "env.step_timeout_s=77")
        joined = lambda: not actor_names(run) & first and bool(actor_names(run))  # noqa: E731
        run.wait_until(joined, "it has joined again", deadline_s=DEADLINE_S)
        trains_on(run)
        assert "so this actor joins again" in run.dir.log("actor-0").read_text()
        for process in (host, learner):
            process.send(signal.SIGTERM)
            assert process.wait() == EXIT_PREEMPTED
        assert run.ledger().balanced and run.audit() == []
        assert run.ledger().expired_leases == 0, "it gave its groups back itself"


def trains_on(run: Run) -> None:
    step = run.last_step()
    run.wait_until(lambda: run.last_step() >= step + 2, "two more steps", deadline_s=DEADLINE_S)


def actor_names(run: Run) -> set[str]:
    return {member.name for member in run.fleet.members()}


def comes_back(run: Run, learner: Process, *settings: str) -> Process:
    """End the learner after its step, and start it again with other settings."""
    learner.send(signal.SIGTERM)
    assert learner.wait() == EXIT_PREEMPTED
    return run.start_learner(*settings)
