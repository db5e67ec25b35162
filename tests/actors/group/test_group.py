"""What becomes of a leased group: it is played and stored, its attempts fail, or others continue it."""

import asyncio
import dataclasses
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis

from slipstream.actors.engine.engine import Completion, EngineDied
from slipstream.actors.group.group import Episodes, EpisodeSetup, rollout_group
from slipstream.actors.host.act import EXIT_RUN_FAILED, act
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.process.shutdown import EXIT_PREEMPTED, Shutdown
from slipstream.common.records.trajectory import Task, Trajectory
from slipstream.common.text.action_format import FORMATS
from slipstream.envhub.env import EnvError, Observation
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.failures import DIED_TWICE
from slipstream.replay.records.ticket import Lease, Ticket
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, ids
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.guess import WORDS, GuessEnv
from tests.processes import Gate
from tests.replay.records.attempts import Views, leased, make_buffer, ticket
from tests.waiting import until

TURNS = 3
MEMBERS = 2
DEADLINE_S = 60.0
TOKENIZER = merging_tokenizer(CHATML)


class ClosesSlowly(GuessEnv):
    """An environment that never closes, and leaves a file in the folder `closing` when it was asked to."""

    def __init__(self, closing: str) -> None:
        super().__init__(turns=TURNS)
        self._closing = Path(closing)

    async def close(self) -> None:
        (self._closing / str(id(self))).touch()
        await asyncio.sleep(3600)


class SpeaksNumpy(GuessEnv):
    """An environment whose numbers are numpy's."""

    async def step(self, action: str) -> Observation:
        said = await super().step(action)
        rewards = {name: np.float64(reward) for name, reward in said.rewards.items()}
        flags = {"success": np.bool_(said.success), "valid_action": np.bool_(said.valid_action)}
        return dataclasses.replace(said, rewards=rewards, score=np.float32(said.score), **flags)


class SaysHalfACharacter(GuessEnv):
    """An environment that fails with words that are no Unicode: by an error, or by its complaint."""

    def __init__(self, complains: bool) -> None:
        super().__init__()
        self._error = EnvError if complains else ValueError

    async def step(self, action: str) -> Observation:
        raise self._error("no such item: \ud83d")


class Actor:
    """An actor in this process, without a model: each turn is a word that the seed chooses."""

    def __init__(self, name: str, run_id: str, *, env_name: str = "tests.guess:GuessEnv", **env_options: Any) -> None:
        self.seeds: list[int | None] = []  # of the turns that the engine was asked for
        self.engine = ScriptedEngine(
            self._word, policy_version=0, schedule=Schedule(token_time_s=0.001), max_tokens=ALLOWANCE.max_tokens
        )
        self.setup = EpisodeSetup(
            run_id=run_id,
            actor=name,
            envs={"shop": MixtureEntry(name=env_name, options=env_options)},  # as the tickets of attempts.py say
            engine=self.engine,
            tokenizer=TOKENIZER,
            action_format=FORMATS["plain"],
            allowance=ALLOWANCE,
            provenance=attempt_on().provenance,
            episodes=Episodes(),
        )

    def _word(self, tokens: list[int], seed: int | None) -> list[int]:
        self.seeds.append(seed)
        return [*ids(TOKENIZER, random.Random(seed).choice(WORDS)), TOKENIZER.eos_token_id]

    async def stands_in_turn(self, turn: int) -> None:
        """Return once every member was answered by the engine in `turn`, and waits for its environment."""
        await until(lambda: len(self.seeds) == MEMBERS * (turn + 1) and self.engine.load().num_running == 0)

    def lease(self, buffer: Views) -> Lease:
        return leased(buffer, self.setup.actor)

    async def play(self, buffer: Views, lease: Lease | None = None) -> None:
        """Roll out one group to its end."""
        await rollout_group(lease or self.lease(buffer), setup=self.setup, buffer=buffer.actor)

    def plays(self, buffer: Views, lease: Lease | None = None) -> None:
        asyncio.run(self.play(buffer, lease))

    def plays_until_cancelled(self, buffer: Views, *, in_turn: int) -> None:
        """Roll out one group until every member stands in `in_turn`, behind a gate, and let go of it there."""

        async def play() -> None:
            task = asyncio.create_task(self.play(buffer))
            await self.stands_in_turn(in_turn)
            await let_go(task)

        asyncio.run(play())


async def let_go(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def buffer_with(client: redis.Redis, run_id: str, *tickets: Ticket, **limits: Any) -> Views:
    """A buffer with these groups queued, or with one."""
    return make_buffer(client, run_id, **limits).start(*(tickets or [ticket(0, num_members=MEMBERS)]))


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    return buffer_with(redis_client, run_id)


def trained(buffer: Views) -> list[Trajectory]:
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    return group.trajectories


def nobodys(trajectory: Trajectory) -> Trajectory:
    """All but who made it, in which run, and when."""
    turns = [msgspec.structs.replace(turn, generate_s=0.0, env_s=0.0) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=turns, run_id="", actor="", started_at_s=0.0, duration_s=0.0)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    gate = Gate(tmp_path / "gate")
    gate.close()
    return gate


def test_a_group_that_is_let_go_in_mid_episode_is_gone_on_with_by_another_and_comes_out_the_same(
    redis_client: redis.Redis, run_id: str, gate: Gate
) -> None:
    undisturbed, buffer = (buffer_with(redis_client, name) for name in (f"{run_id}-undisturbed", run_id))
    alone = Actor("alone", f"{run_id}-undisturbed", turns=TURNS)
    alone.plays(undisturbed)

    leaver = Actor("leaver", run_id, turns=TURNS, gate=str(gate), gate_turn=1)
    leaver.plays_until_cancelled(buffer, in_turn=1)
    ledger = buffer.ledger
    assert (ledger.partials_handed_in, ledger.partials_held, ledger.queued) == (MEMBERS, MEMBERS, 1)
    assert (ledger.expired_leases, ledger.redone_members, ledger.failed) == (0, 0, {})
    assert buffer.audit() == []

    heir = Actor("heir", run_id, turns=TURNS)
    heir.plays(buffer)
    ledger = buffer.ledger
    assert (ledger.partials_resumed, ledger.partials_held, ledger.ready) == (MEMBERS, 0, 1)
    assert buffer.audit() == []
    assert len(heir.seeds) == MEMBERS * (TURNS - 1)  # the first turns are not sampled again
    assert set(leaver.seeds[:MEMBERS]) | set(heir.seeds) == set(alone.seeds)
    resumed, expected = trained(buffer), trained(undisturbed)
    assert [nobodys(member) for member in resumed] == [nobodys(member) for member in expected]
    assert {member.actor for member in resumed} == {"heir"}


def test_an_episode_without_a_whole_turn_is_not_handed_in(buffer: Views, run_id: str, gate: Gate) -> None:
    Actor("leaver", run_id, turns=TURNS, gate=str(gate)).plays_until_cancelled(buffer, in_turn=0)
    ledger = buffer.ledger
    assert (ledger.partials_handed_in, ledger.queued, ledger.redone_members) == (0, 1, 0)
    lease = leased(buffer, "heir")
    assert (lease.partials, lease.missing) == ({}, dict.fromkeys(range(MEMBERS), 0))


async def test_a_finished_episode_of_a_lost_group_is_stored(buffer: Views, run_id: str, tmp_path: Path) -> None:
    leaver = Actor("leaver", run_id, env_name=f"{__name__}:ClosesSlowly", closing=str(tmp_path))
    task = asyncio.create_task(leaver.play(buffer))
    await until(lambda: len(list(tmp_path.iterdir())) == MEMBERS)
    assert buffer.ledger.inserted == 0
    await let_go(task)
    assert (buffer.ledger.inserted, buffer.ledger.ready) == (MEMBERS, 1)


def test_a_partial_that_does_not_replay_begins_anew(buffer: Views, run_id: str, gate: Gate) -> None:
    Actor("leaver", run_id, turns=TURNS, gate=str(gate), gate_turn=1).plays_until_cancelled(buffer, in_turn=1)
    heir = Actor("heir", run_id, turns=1)  # in whose environment the recorded turn is the last
    heir.plays(buffer)
    ledger = buffer.ledger
    assert ledger.failed == ledger.partials_discarded == {"replay_mismatch": MEMBERS}
    assert (ledger.partials_resumed, ledger.redone_members, ledger.ready) == (0, MEMBERS, 1)
    assert "the episode ends with turn 0" in buffer.learner.failures()[0].reason
    assert [(member.attempt, len(member.turns)) for member in trained(buffer)] == [(1, 1)] * MEMBERS
    assert buffer.audit() == []


def test_no_attempt_is_played_for_ever_that_kills_its_engine(redis_client: redis.Redis, run_id: str) -> None:
    buffer = buffer_with(redis_client, run_id, max_attempts=2)
    seeds = list[set[int | None]]()
    while (lease := buffer.actor.lease("actor")) is not None:
        actor, seen = Actor("actor", run_id, turns=TURNS), set[int | None]()
        actor.setup = dataclasses.replace(actor.setup, engine=Deadly(actor.setup.engine, seen))
        with pytest.raises(EngineDied, match="half a character"):
            actor.plays(buffer, lease)
        seeds.append(seen)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] and len(seeds) == 4, "two deaths for each attempt"
    ledger = buffer.ledger
    assert (ledger.dropped, ledger.failed) == ({"infra_failure": 1}, {"infra_failure": 2 * MEMBERS})
    assert buffer.learner.failures()[0].reason == f"{DIED_TWICE}: half a character" and buffer.audit() == []


class Deadly:
    def __init__(self, engine: Any, seeds: set[int | None]) -> None:
        self._engine, self._seeds = engine, seeds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *_: Any, seed: int | None = None, **__: Any) -> Completion:
        self._seeds.add(seed)
        await asyncio.sleep(0)  # so that all members ask
        raise EngineDied("half a character")


def test_a_record_that_the_buffer_refuses_fails_its_attempt(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.replay.buffer.payloads.MAX_TRAJECTORY_BYTES", 100)
    buffer = buffer_with(redis_client, run_id, max_attempts=2)
    Actor("actor", run_id, turns=TURNS).plays(buffer)
    ledger = buffer.ledger
    assert (ledger.dropped, ledger.inserted) == ({"infra_failure": 1}, 0)
    assert "bytes, the limit is 100" in buffer.learner.failures()[0].reason


def test_a_task_of_no_environment_of_the_run_is_an_env_failure(redis_client: redis.Redis, run_id: str) -> None:
    """As of a run that was resumed with another `env.mixture`."""
    of = msgspec.structs.replace(ticket(0, num_members=MEMBERS), task=Task(env="elsewhere", split="train", index=0))
    buffer = buffer_with(redis_client, run_id, of, max_attempts=1)
    Actor("actor", run_id, turns=TURNS).plays(buffer)
    assert buffer.ledger.dropped == {"env_failure": 1}
    assert buffer.learner.failures()[0].reason == "the run has no environment 'elsewhere', only shop"


def test_an_environments_numbers_may_be_numpys(buffer: Views, run_id: str) -> None:
    Actor("actor", run_id, env_name=f"{__name__}:SpeaksNumpy", turns=TURNS).plays(buffer)
    assert [len(member.turns) for member in trained(buffer)] == [TURNS] * MEMBERS


@pytest.mark.parametrize(
    ("complains", "reason"),
    [(False, "ValueError: no such item: \\ud83d (test_group.py:"), (True, "no such item: \\ud83d")],
)
def test_a_failure_whose_words_are_no_unicode_is_recorded_all_the_same(
    redis_client: redis.Redis, run_id: str, complains: bool, reason: str
) -> None:
    buffer = buffer_with(redis_client, run_id, max_attempts=1)
    Actor("actor", run_id, env_name=f"{__name__}:SaysHalfACharacter", complains=complains).plays(buffer)
    assert buffer.ledger.dropped == {"env_failure": 1}
    assert buffer.learner.failures()[0].reason.startswith(reason)


def test_a_group_that_ends_its_actors_ends_no_more_of_them_than_it_has_attempts(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr("slipstream.actors.episode.actions.parsed", refuse)
    buffer = buffer_with(redis_client, run_id, lease_ttl_s=0.2, max_attempts=2)
    for name in ("first", "second"):
        with pytest.raises(ZeroDivisionError, match="nobody foresaw this"):
            Actor(name, run_id, turns=TURNS).plays(buffer)
        time.sleep(0.3)
    assert buffer.actor.lease("third") is None
    assert buffer.ledger.dropped == {"lease_expired": 1}


async def test_no_token_is_lost_from_the_count_when_groups_end_together(redis_client: redis.Redis, run_id: str) -> None:
    buffer = buffer_with(redis_client, run_id, *(ticket(group_id, num_members=MEMBERS) for group_id in range(20)))
    actor = Actor("actor", run_id, turns=TURNS, step_s=0.005)

    async def play(lease: Lease, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await actor.play(buffer, lease)

    await asyncio.gather(*[play(actor.lease(buffer), 0.003 * number) for number in range(20)])
    groups = buffer.learner.claim(1, 20, policy_version=0, max_lag=0)
    sampled = [turn.stop - turn.start for group in groups for member in group.trajectories for turn in member.turns]
    assert actor.setup.episodes.kept_tokens == sum(sampled)


async def acting(actor: Actor, buffer: Views, shutdown: Shutdown, *, drain_s: float = 0.1, **settings: Any) -> int:
    """The whole loop of an actor, in a run that trains; it has room for one group unless given more."""
    fleet, bulletin = Fleet(buffer.client, buffer.run_id), Bulletin(buffer.client, buffer.run_id)
    fleet.set_run_state(RunState.TRAINING)
    room = ActorsConfig(drain_s=drain_s, max_episodes=MEMBERS)
    given: dict[str, Any] = {"buffers": {"train": buffer.actor}, "actors": room} | settings
    actor.setup.episodes.max_running = given["actors"].max_episodes
    return await act(actor.setup, bulletin=bulletin, fleet=fleet, shutdown=shutdown, **given)


async def test_an_actor_ends_with_its_engine_and_a_death_costs_neither_an_attempt_nor_a_whole_turn(
    buffer: Views, run_id: str, gate: Gate, shutdown: Shutdown
) -> None:
    victim = Actor("victim", run_id, turns=TURNS, gate=str(gate), gate_turn=1)
    task = asyncio.create_task(acting(victim, buffer, shutdown))
    await victim.stands_in_turn(1)
    await victim.engine.close()
    gate.open()
    with pytest.raises(EngineDied, match="the engine is closed"):
        await task
    ledger = buffer.ledger
    assert (ledger.queued, ledger.redone_members, ledger.failed, ledger.partials_handed_in) == (1, 0, {}, MEMBERS)
    await Actor("heir", run_id, turns=TURNS).play(buffer)
    assert buffer.ledger.partials_resumed == MEMBERS
    assert [member.attempt for member in trained(buffer)] == [0] * MEMBERS


async def test_a_group_that_is_leased_while_the_engine_dies_counts_no_death(
    buffer: Views, run_id: str, shutdown: Shutdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, lease = Actor("victim", run_id, turns=TURNS), buffer.actor.lease
    loop = asyncio.get_running_loop()

    def lease_late(actor: str) -> Lease | None:
        asyncio.run_coroutine_threadsafe(victim.engine.close(), loop).result()
        return lease(actor)

    monkeypatch.setattr(buffer.actor, "lease", lease_late)
    with pytest.raises(EngineDied):
        await acting(victim, buffer, shutdown)
    heir = lease("heir")
    assert heir is not None
    buffer.actor.release(heir, death="the first death of these attempts")
    assert buffer.ledger.redone_members == 0


@pytest.mark.parametrize(("state", "exit_code"), [(RunState.FINISHED, 0), (RunState.FAILED, EXIT_RUN_FAILED)])
async def test_an_actor_leaves_a_run_that_is_over_for_good_and_one_that_failed_to_come_back(
    buffer: Views, run_id: str, shutdown: Shutdown, state: RunState, exit_code: int
) -> None:
    task = asyncio.create_task(acting(Actor("actor", run_id, turns=TURNS), buffer, shutdown))
    await until(lambda: buffer.ledger.ready == 1)
    Fleet(buffer.client, run_id).set_run_state(state)
    assert await task == exit_code


async def test_an_actor_that_gets_its_own_lost_group_again_plays_it_once(
    redis_client: redis.Redis, run_id: str, gate: Gate, shutdown: Shutdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped for longer than a lease lasts, and asks for work before it renews what it had."""
    monkeypatch.setattr("slipstream.actors.host.beat.BEAT_S", DEADLINE_S)
    buffer = buffer_with(redis_client, run_id, lease_ttl_s=2.0)
    actor = Actor("actor", run_id, turns=TURNS, gate=str(gate), gate_turn=1)
    room = ActorsConfig(drain_s=0.1, max_episodes=2 * MEMBERS)
    task = asyncio.create_task(acting(actor, buffer, shutdown, actors=room))
    await actor.stands_in_turn(1)
    await until(lambda: buffer.ledger.expired_leases == 1)
    await asyncio.sleep(0.3)
    assert actor.setup.episodes.num_running == MEMBERS
    gate.open()
    await until(lambda: buffer.ledger.ready == 1)
    await until(lambda: actor.setup.episodes.num_running == 0)
    shutdown.notice()
    assert await task == EXIT_PREEMPTED
    assert buffer.ledger.inserted == MEMBERS


@pytest.mark.parametrize("may_finish", [False, True])
async def test_an_actor_that_is_told_to_leave_finishes_what_it_can_hands_in_the_rest_and_begins_nothing(
    buffer: Views, run_id: str, gate: Gate, shutdown: Shutdown, may_finish: bool
) -> None:
    leaver = Actor("leaver", run_id, turns=TURNS, gate=str(gate), gate_turn=1)
    task = asyncio.create_task(acting(leaver, buffer, shutdown, drain_s=DEADLINE_S if may_finish else 0.1))
    await leaver.stands_in_turn(1)
    buffer.learner.open([ticket(1)])
    signal.raise_signal(signal.SIGTERM)
    if may_finish:
        gate.open()
    assert await task == EXIT_PREEMPTED
    ledger = buffer.ledger
    found = (ledger.inserted, ledger.ready, ledger.queued, ledger.partials_held, ledger.expired_leases)
    assert found == ((MEMBERS, 1, 1, 0, 0) if may_finish else (0, 0, 2, MEMBERS, 0))
    assert Fleet(buffer.client, run_id).members() == []
