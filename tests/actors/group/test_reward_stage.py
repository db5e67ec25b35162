"""When the parts of a reward are computed: after the episode, without its place in the engine, and before it counts."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import StopReason, Task, Trajectory
from slipstream.envhub.rewards.episode import Episode
from slipstream.envhub.rewards.part import parts_of
from slipstream.replay.fleet.fleet import Fleet, RunState
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, rollout_of
from tests.actors.group.test_group import MEMBERS, TURNS, Actor, acting, buffer, buffer_with, let_go, nobodys, trained
from tests.envhub.rewards.own import OWN, Own, own
from tests.guess import GuessEnv
from tests.replay.records.attempts import Views, ticket
from tests.waiting import until

__all__ = ["buffer", "own"]  # fixtures


def scoring(actor: Actor, rewards: dict[str, Any]) -> Scoring:
    parts = {"shop": parts_of("env.rewards", rewards)}
    return Scoring(parts=parts, tokenizer=actor.setup.tokenizer, allowance=ALLOWANCE)


def scorer(name: str, run_id: str, rewards: dict[str, Any], **options: Any) -> Actor:
    actor = Actor(name, run_id, **({"turns": TURNS} | options))
    actor.setup = dataclasses.replace(actor.setup, scoring=scoring(actor, rewards))
    return actor


class Stage:
    """A part that waits until it may answer, and then gives the number of turns that it has seen."""

    def __init__(self, own: Own) -> None:
        self.may_answer = asyncio.Event()
        self.seen = list[Episode]()
        own.stage = self.answer

    async def answer(self, episode: Episode) -> float:
        self.seen.append(episode)
        await self.may_answer.wait()
        return float(len(episode.turns))


STAGED = {"staged": {"part": f"{OWN}:stage", "weight": 0.5}, "format": {"weight": 0}}


def unscored(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(nobodys(trajectory), scoring_s=0.0)


async def test_an_episode_is_stored_with_its_parts_and_has_no_place_in_the_engine_while_they_are_computed(
    buffer: Views, run_id: str, own: Own
) -> None:
    stage = Stage(own)
    actor = scorer("actor", run_id, STAGED)
    task = asyncio.create_task(actor.play(buffer))
    await until(lambda: len(stage.seen) == MEMBERS)
    assert actor.setup.episodes.num_running == 0
    assert buffer.ledger.inserted == 0
    stage.may_answer.set()
    await task
    assert actor.setup.episodes.num_running == 0
    for member in trained(buffer):
        assert [set(turn.rewards) for turn in member.turns] == [{"said", "staged", "format"}] * TURNS
        assert [turn.rewards["staged"] for turn in member.turns] == [0, 0, 0.5 * TURNS]
        assert member.part_values == {"staged": TURNS, "format": 1.0} and member.scoring_s > 0
        said = [turn.rewards["said"] for turn in member.turns]
        assert member.score == pytest.approx(sum(said) / TURNS), "the environment's own"
        assert member.success == (member.score > 0.5)
        assert member.total_reward == pytest.approx(sum(said) + 0.5 * TURNS)


async def test_a_slow_part_stops_no_group(redis_client: redis.Redis, run_id: str, own: Own, shutdown: Shutdown) -> None:
    """The actor has places for one group only, and its leases are renewed."""
    tickets = [ticket(group_id, num_members=MEMBERS) for group_id in range(3)]
    buffer = buffer_with(redis_client, run_id, *tickets, lease_ttl_s=3.0)
    stage = Stage(own)
    task = asyncio.create_task(acting(scorer("actor", run_id, STAGED), buffer, shutdown))
    await until(lambda: len(stage.seen) == 3 * MEMBERS)
    await asyncio.sleep(4.0)  # longer than a lease lasts without a heartbeat
    assert buffer.ledger.inserted == 0
    stage.may_answer.set()
    await until(lambda: buffer.ledger.inserted == 3 * MEMBERS)
    Fleet(redis_client, run_id).set_run_state(RunState.FINISHED)
    assert await task == 0
    ledger = buffer.ledger
    assert (ledger.expired_leases, ledger.ready, ledger.failed) == (0, 3, {})


async def test_a_group_let_go_while_scored_comes_out_the_same(redis_client: redis.Redis, run_id: str, own: Own) -> None:
    undisturbed, buffer = (buffer_with(redis_client, name) for name in (f"{run_id}-undisturbed", run_id))
    stage = Stage(own)
    task = asyncio.create_task(scorer("leaver", run_id, STAGED).play(buffer))
    await until(lambda: len(stage.seen) == MEMBERS)
    await let_go(task)
    ledger = buffer.ledger
    assert (ledger.inserted, ledger.partials_held, ledger.redone_members) == (0, MEMBERS, 0)
    stage.may_answer.set()
    heir = scorer("heir", run_id, STAGED)
    await heir.play(buffer)
    assert len(heir.seeds) == MEMBERS, "only the last turn is sampled again"
    await scorer("alone", f"{run_id}-undisturbed", STAGED).play(undisturbed)
    before, after, whole = stage.seen[:MEMBERS], stage.seen[MEMBERS : 2 * MEMBERS], stage.seen[2 * MEMBERS :]
    by_text = [sorted(str(episode.messages) for episode in episodes) for episodes in (before, after, whole)]
    assert by_text[0] == by_text[1] == by_text[2], "a part sees the replayed turns too"
    assert buffer.ledger.failed == {}
    assert [unscored(member) for member in trained(buffer)] == [unscored(member) for member in trained(undisturbed)]


async def test_one_turn_let_go_while_scored_is_played_again(buffer: Views, run_id: str, own: Own) -> None:
    stage = Stage(own)
    task = asyncio.create_task(scorer("leaver", run_id, STAGED, turns=1).play(buffer))
    await until(lambda: len(stage.seen) == MEMBERS)
    await let_go(task)
    ledger = buffer.ledger
    assert (ledger.inserted, ledger.partials_held, ledger.queued, ledger.failed) == (0, 0, 1, {})


def test_a_part_that_fails_is_redone_and_never_a_reward_of_0(buffer: Views, run_id: str, own: Own) -> None:
    num_calls = 0

    def away_at_first(episode: Episode) -> float:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= MEMBERS:
            raise ConnectionError("the judge is away")
        return 3.0

    own.stage = away_at_first
    scorer("actor", run_id, STAGED).plays(buffer)
    ledger = buffer.ledger
    assert ledger.failed == {"env_failure": MEMBERS} and ledger.redone_members == MEMBERS
    assert "`env.rewards.staged`: ConnectionError: the judge is away" in buffer.learner.failures()[0].reason
    assert [(member.attempt, member.part_values["staged"]) for member in trained(buffer)] == [(1, 3.0)] * MEMBERS


async def played(
    rewards: dict[str, Any], *, split: str = "train", change: Callable[[EpisodeRecord], None] = lambda record: None
) -> Any:
    actor = Actor("actor", "run", turns=TURNS)
    record = EpisodeRecord(attempt=dataclasses.replace(attempt_on(), task=Task(env="shop", split=split, index=0)))
    trajectory = await rollout_of(GuessEnv(turns=TURNS), actor.engine, record=record, tokenizer=actor.setup.tokenizer)
    change(record)
    return await rewarded(trajectory, record, scoring=scoring(actor, rewards))


async def test_of_a_held_out_task_only_the_score_is_computed() -> None:
    assert (await played({"format": {}}, split="held_out")).part_values == {}
    scored = await played({"format": {"success_from": 0.1}, "efficiency": {}}, split="held_out")
    assert scored.part_values == {"format": 1.0} and (scored.score, scored.success) == (1.0, True)


async def test_other_parts_see_the_score_and_the_success_that_a_part_gives(own: Own) -> None:
    """Where an environment has no score, `only_if: success` would never hold."""
    seen = list[Episode]()
    own.see = lambda episode: seen.append(episode) or 1.0
    own.half = lambda episode: 0.5
    own.nothing = lambda episode: None
    won, lost = ({"part": f"{OWN}:see", "only_if": when} for when in ("success", "failure"))

    async def values(least: float) -> dict[str, float]:
        half = {"part": f"{OWN}:half", "success_from": least}
        return (await played({"won": won, "half": half, "lost": lost})).part_values

    assert await values(0.5) == {"half": 0.5, "won": 1.0}
    assert await values(0.6) == {"half": 0.5, "lost": 1.0}
    assert [(episode.score, episode.success) for episode in seen] == [(0.5, True), (0.5, False)]
    with pytest.raises(EpisodeFailed, match=r"`env\.rewards\.none`: it gives no value"):
        await played({"none": {"part": f"{OWN}:nothing", "success_from": 1}})


async def test_an_episode_of_tokens_alone_is_decoded(own: Own) -> None:
    """As those of environments that render their prompts themselves."""
    seen = list[Episode]()
    own.see = lambda episode: seen.append(episode) or 1.0

    def forget(record: EpisodeRecord) -> None:
        record.opening, record.exchanges = (), []

    rewards = {"seen": {"part": f"{OWN}:see"}}
    await played(rewards)
    await played(rewards, change=forget)
    known, decoded = seen
    assert [turn.reply for turn in decoded.turns] == [turn.reply for turn in known.turns]
    assert [turn.action for turn in decoded.turns] == [turn.action for turn in known.turns]
    assert "say" in decoded.messages[0]["content"] and "again" in decoded.messages[2]["content"]
    assert len(decoded.messages) == 2 * TURNS


class Leaves(BaseException):
    """What a function may raise, and an actor must survive."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Leaves("for good"), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_function_raises_fails_its_attempt_by_name(own: Own, error: BaseException, is_async: bool) -> None:
    def leave(episode: Episode) -> float:
        raise error

    async def leave_async(episode: Episode) -> float:
        raise error

    own.leave = leave_async if is_async else leave
    with pytest.raises(EpisodeFailed, match=r"`env\.rewards\.left`: ") as failure:
        await played({"left": {"part": f"{OWN}:leave"}, "format": {}})
    assert failure.value.stop_reason is StopReason.ENV_ERROR
