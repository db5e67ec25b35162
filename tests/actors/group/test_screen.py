"""A group with a screen: it begins with few members, and gets the others only if the returns of these differ."""

import re
from pathlib import Path

import pytest
import redis

from slipstream.common.config.config import ConfigError, load_config
from slipstream.learner.objective.advantage import returns_differ
from slipstream.learner.supply.supply import Supply
from slipstream.replay.buffer.listing import find_group
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.replay.run.archive import Archive, ArchivedStep, ArchiveWriter
from tests.replay.records.attempts import Views, attempt_at, leased, make_buffer, partial_of, ticket

SCREENED = ("replay.group_size=4", "replay.screen_size=2", "replay.groups_per_step=1", "replay.target_lag=0")


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    return buffer


def screened(buffer: Views) -> Lease:
    """The lease of a group of four members that begins with two."""
    buffer.learner.open([ticket(0, num_members=4, screen_size=2), ticket(1)])
    return leased(buffer)


def earn(buffer: Views, lease: Lease, run_id: str, **returns: float) -> list[InsertResult]:
    """Insert members by their numbers: `m0=1.0`."""
    return [
        buffer.actor.insert(lease, attempt_at(lease, int(name[1:]), run_id=run_id, reward=reward))
        for name, reward in returns.items()
    ]


def test_a_group_whose_screen_earned_the_same_is_complete_without_its_other_members(
    buffer: Views, redis_client: redis.Redis, run_id: str, tmp_path: Path
) -> None:
    lease = screened(buffer)
    assert (lease.missing, lease.ticket.num_members) == ({0: 0, 1: 0}, 2)
    assert earn(buffer, lease, run_id, m1=0.5, m0=0.5) == [InsertResult.STORED] * 2
    listed = find_group(redis_client, run_id, 0)
    assert listed is not None and (listed.state, len(listed.members), listed.num_members) == ("ready", 2, 2)
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert [member.member for member in group.trajectories] == [0, 1]
    # Whatever reads a group later reads a whole one.
    archived = ArchivedStep(step=1, policy_version=0, conditions={}, groups=[group])
    ArchiveWriter(tmp_path, run_id, epoch=1).append(archived)
    assert Archive(tmp_path, run_id).read(1, vocab_size=100, max_group_bytes=1 << 20) == archived
    buffer.learner.drop([0], "zero_variance")
    ledger = buffer.learner.ledger()
    assert (ledger.dropped, ledger.dropped_trajectories) == ({"zero_variance": 1}, {"zero_variance": 2})
    assert buffer.audit() == []


def test_a_group_whose_screen_differs_is_queued_first_for_its_other_members(buffer: Views, run_id: str) -> None:
    first = screened(buffer)
    assert earn(buffer, first, run_id, m0=0.0, m1=1.0) == [InsertResult.STORED] * 2
    assert buffer.actor.heartbeat("a", [first]) == set()
    buffer.actor.release(first)  # as an actor does at the end of a group
    assert (buffer.learner.ledger().queued, buffer.learner.ledger().ready, buffer.audit()) == (2, 0, [])
    second = leased(buffer, "b")
    assert (second.ticket.group_id, second.missing, second.ticket.num_members) == (0, {2: 0, 3: 0}, 4)
    # The reply to a screening member may be lost, and a zombie may send one more: neither changes anything.
    assert earn(buffer, first, run_id, m1=1.0) == [InsertResult.DUPLICATE]
    assert earn(buffer, second, run_id, m2=1.0, m3=1.0) == [InsertResult.STORED] * 2
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert [member.total_reward for member in group.trajectories] == [0.0, 1.0, 1.0, 1.0]
    assert group.ticket.num_members == 4
    buffer.learner.settle(1)
    assert (buffer.learner.ledger().trained_trajectories, buffer.audit()) == (4, [])


def test_a_preempted_screen_is_finished_by_another_actor_and_compared_with_what_was_stored(
    buffer: Views, run_id: str
) -> None:
    first = screened(buffer)
    assert earn(buffer, first, run_id, m0=0.0) == [InsertResult.STORED]
    buffer.actor.hand_in(first, partial_of(first, 1, run_id=run_id))
    buffer.actor.release(first)
    second = leased(buffer, "b")
    assert (second.missing, set(second.partials)) == ({1: 0}, {1})
    assert earn(buffer, second, run_id, m1=1.0) == [InsertResult.STORED]
    assert leased(buffer, "c").missing == {2: 0, 3: 0}
    assert (buffer.learner.ledger().partials_resumed, buffer.audit()) == (1, [])


@pytest.mark.parametrize("gap", [0.0, 5e-7, 2e-6, 1.0])
def test_the_buffer_and_the_learner_agree_on_what_differs(buffer: Views, run_id: str, gap: float) -> None:
    earn(buffer, screened(buffer), run_id, m0=-1.0, m1=-1.0 + gap)
    assert (buffer.learner.ledger().ready == 0) is returns_differ([-1.0, -1.0 + gap])


def test_a_group_that_a_person_requeues_is_screened_again_unless_it_had_grown(buffer: Views, run_id: str) -> None:
    earn(buffer, screened(buffer), run_id, m0=1.0, m1=1.0)
    assert buffer.people.requeue([0]) == 1
    again = leased(buffer)
    assert again.missing == {0: 0, 1: 0}
    earn(buffer, again, run_id, m0=1.0, m1=0.0)
    grown = leased(buffer)
    assert buffer.people.requeue([0]) == 1
    assert grown.missing == {2: 0, 3: 0} and leased(buffer).missing == dict.fromkeys(range(4), 0)
    assert buffer.audit() == []


@pytest.mark.parametrize("value", [b"", b"many", b"2", b"-4", b"9" * 30])
def test_a_damaged_size_to_grow_to_is_never_taken_for_one(
    buffer: Views, redis_client: redis.Redis, run_id: str, value: bytes
) -> None:
    buffer.learner.open([ticket(0, num_members=4, screen_size=2)])
    redis_client.hset(key(run_id, "train", "group", 0), "grows_to", value)
    assert buffer.actor.lease("a") is None  # it is set back, for the learner
    assert (buffer.learner.ledger().dropped, buffer.audit()) == ({"damaged": 1}, [])


@pytest.mark.parametrize("value", [b"", b"much", b"nan", b"inf"])
def test_a_damaged_return_of_a_screen_ends_or_grows_the_group_and_nothing_else(
    buffer: Views, redis_client: redis.Redis, run_id: str, value: bytes
) -> None:
    lease = screened(buffer)
    earn(buffer, lease, run_id, m0=1.0)
    redis_client.hset(key(run_id, "train", "group", 0), mapping={"lowest_return": value, "highest_return": value})
    assert earn(buffer, lease, run_id, m1=1.0) == [InsertResult.STORED]
    ledger = buffer.learner.ledger()
    assert (ledger.ready + ledger.queued, ledger.leased, buffer.audit()) == (2, 0, [])


def test_the_supply_opens_groups_with_the_configured_screen_and_counts_short_ones_as_teaching_nothing(
    buffer: Views, run_id: str
) -> None:
    supply = Supply(buffer.learner, load_config(None, [*SCREENED]), first_group_id=0)
    supply.admit(1, [], published_version=0)
    lease = leased(buffer)
    assert (lease.missing, lease.ticket.screen_size) == ({0: 0, 1: 0}, 2)
    earn(buffer, lease, run_id, m0=1.0, m1=1.0)
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    useful, rejected = supply._sorted_out([group])
    assert (useful, list(rejected)) == ([], ["zero_variance"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["replay.screen_size=1"], "`replay.screen_size` must be 0, or 2 to replay.group_size - 1 = 7, got 1; 0 plays"),
        (["replay.screen_size=8"], "`replay.screen_size` must be 0, or 2 to replay.group_size - 1 = 7, got 8"),
        (
            ["replay.screen_size=4", "objective.advantage=reinforce_pp"],
            "`replay.screen_size` must be 0 with this objective (advantage reinforce_pp, allocation last_token), got 4",
        ),
        (
            ["replay.screen_size=4", "env.rewards.better={part: judge, compare: listwise}"],
            "`replay.screen_size` must be 0 with a judge of whole groups, as in env.rewards.better, got 4; a screen",
        ),
    ],
)
def test_a_screen_that_would_lose_what_teaches_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_config(None, overrides)
