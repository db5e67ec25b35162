"""Visits of states: counted once for each stored episode, over the whole run, and rewarded by `run_novelty`."""

import asyncio

import msgspec
import pytest
import redis

from slipstream.common.config.config import load_config
from slipstream.common.records.trajectory import Fork, Outcome, Task, Trajectory
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.part import composed, count_by, parts_of
from slipstream.envhub.rewards.run_novelty import RunNovelty
from slipstream.replay.buffer.visits import NUM_BUCKETS, Visits, bucket_of, visits_of
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult, Lease
from tests.envhub.rewards.test_rewards import episode_of, turn_of
from tests.replay.records.attempts import Views, leased, ticket


@pytest.fixture
def visits(redis_client: redis.Redis, run_id: str) -> Visits:
    return Visits(redis_client, run_id)


def in_states(buffer: Views, lease: Lease, member: int, *states: str, attempt: int = 0) -> Trajectory:
    """An episode of `lease` that was in `states`, one token in each."""
    whole = buffer.attempt(lease, member)
    turn = whole.turns[0]
    assert turn.stop - turn.start >= len(states)
    turns = [
        msgspec.structs.replace(turn, start=turn.start + at, stop=turn.start + at + 1, state_key=state)
        for at, state in enumerate(states)
    ]
    turns[-1] = msgspec.structs.replace(turns[-1], stop=turn.stop)
    return msgspec.structs.replace(whole, turns=turns, attempt=attempt)


def test_an_episode_is_counted_when_it_is_stored_and_only_once(buffer: Views, visits: Visits) -> None:
    lease = buffer.begin(ticket(0))
    task = lease.ticket.task
    first = in_states(buffer, lease, 0, "start", "")
    assert visits.read(task, ["start", ""]) == [0, 0]
    assert buffer.actor.insert(lease, first) is InsertResult.STORED
    assert buffer.actor.insert(lease, first) is InsertResult.DUPLICATE
    assert visits.read(task, ["start", "", "start"]) == [1, 0, 1]
    # The other member fails, and is played again; what the failed attempt sends later is refused.
    lost = in_states(buffer, lease, 1, "start", "start")
    assert buffer.actor.fail(lease, 1, attempt=0, outcome=Outcome.ENV_FAILURE, reason="it broke") == 1
    assert buffer.actor.insert(lease, lost) is InsertResult.FENCED
    assert visits.read(task, ["start"]) == [1]
    again = in_states(buffer, lease, 1, "start", "start", attempt=1)
    assert buffer.actor.insert(lease, again) is InsertResult.STORED
    assert visits.read(task, ["start"]) == [3]
    other = Task(env=task.env, split=task.split, index=task.index + 1)
    assert visits.read(other, ["start"]) == [0], "a state of another task is another state"
    assert buffer.audit() == []


def test_a_turn_that_a_fork_has_from_its_parent_is_counted_once(buffer: Views, visits: Visits) -> None:
    buffer.learner.open([ticket(0, num_members=3, num_trees=2, max_fork_turn=1)])
    lease = leased(buffer)
    buffer.actor.insert(lease, in_states(buffer, lease, 0, "start", "hall"))
    fork = Fork(parent=0, num_turns=1)
    forked = msgspec.structs.replace(in_states(buffer, lease, 2, "start", "hall"), fork=fork)
    assert buffer.actor.insert(lease, forked) is InsertResult.STORED
    assert visits.read(lease.ticket.task, ["start", "hall"]) == [1, 2]


def test_nothing_is_counted_where_no_part_needs_it() -> None:
    assert not load_config(None, []).env.counts_visits
    for part in ("run_novelty={}", "new={part: run_novelty, weight: 0.1}"):
        assert load_config(None, [f"env.rewards.{part}"]).env.counts_visits


@pytest.mark.parametrize("damage", [b"", b"x", b"-7", b"9" * 30, b"1.5"])
def test_a_count_that_is_no_number_starts_again(buffer: Views, visits: Visits, damage: bytes) -> None:
    lease = buffer.begin(ticket(0))
    task, name = lease.ticket.task, key(buffer.run_id, "train:visits")
    buffer.client.hset(name, str(bucket_of(task, "start")), damage)
    assert visits.read(task, ["start"]) == [0]
    assert buffer.actor.insert(lease, in_states(buffer, lease, 0, "start")) is InsertResult.STORED
    assert visits.read(task, ["start"]) == ([1] if damage != b"-7" else [0])
    buffer.client.delete(name)
    buffer.client.rpush(name, b"x")
    assert visits.read(task, ["start", "b"]) == [0, 0]
    assert buffer.actor.insert(lease, in_states(buffer, lease, 1, "start")) is InsertResult.STORED
    assert visits.read(task, ["start"]) == [1]


def test_the_bonus_is_of_all_visits_up_to_the_turn() -> None:
    parts = parts_of("env.rewards", {"new": {"part": "run_novelty", "weight": 0.5}})
    count_by(lambda task, states: [{"a": 3, "b": 0}.get(state, 99) for state in states], [parts])
    episode = episode_of(*(turn_of("up", state=state) for state in ("a", "b", "", "a")))
    values = [asyncio.run(part.values(episode, timeout_s=60)) for part in parts]
    found = composed(episode, parts, values)
    assert [turn["new"] for turn in found.rewards] == pytest.approx([0.25, 0.5, 0.0, 0.5 * 5**-0.5])
    with pytest.raises(
        EnvError, match="it counts the states of a run, and this episode has no run; leave the part out"
    ):
        asyncio.run(RunNovelty()(episode))


def test_the_arguments_of_insert_are_buckets_and_visits(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    episode = in_states(buffer, lease, 0, "start", "start")
    assert visits_of(episode) == [bucket_of(episode.task, "start"), 2]
    assert 0 <= bucket_of(episode.task, "start") < NUM_BUCKETS
    assert bucket_of(Task(env="shop", split="train", index=0), "start") == 8506, "it is written in Redis"
