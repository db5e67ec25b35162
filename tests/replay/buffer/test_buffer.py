"""The life of a group, calls that are sent twice, the books, and a server that forgets, fills up or is killed."""

from pathlib import Path

import msgspec
import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.common.records.trajectory import MAX_REWARD, Outcome
from slipstream.replay.records.keys import RunForgotten
from slipstream.replay.records.ticket import InsertResult
from slipstream.replay.server.redis_server import start_server
from tests.replay.records.attempts import (
    Views,
    attempt_at,
    earning,
    ids,
    leased,
    make_buffer,
    make_ready,
    partial_of,
    stored_keys,
    ticket,
)


def test_a_group_goes_from_ticket_to_trained_and_leaves_no_key(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    assert buffer.learner.open([ticket(0)]) == 1
    lease = leased(buffer)
    assert lease.missing == {0: 0, 1: 0}
    assert buffer.actor.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    assert buffer.learner.claim(1, 1, policy_version=0, max_lag=0) == []
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert group.ticket == ticket(0)
    assert group.trajectories == [attempt_at(lease, 0, run_id=run_id), attempt_at(lease, 1, run_id=run_id)]
    assert buffer.learner.settle(1) == 1
    ledger = buffer.learner.ledger()
    assert (ledger.opened, ledger.trained, ledger.inserted, ledger.trained_trajectories) == (1, 1, 2, 2)
    assert ledger.balanced and buffer.audit() == []
    assert stored_keys(redis_client, run_id, "group") + stored_keys(redis_client, run_id, "blob") == []


def test_the_books_say_what_each_account_took_to_make(buffer: Views, run_id: str) -> None:
    """Each trajectory is 4 tokens, 1 turn and 100 ms; half of group 2 is never made."""
    for group_id, policy_version in ((0, 5), (1, 9)):
        make_ready(buffer, run_id, group_id, policy_version=policy_version)
    buffer.learner.open([ticket(2)])
    lease = leased(buffer)
    buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id))
    assert buffer.learner.ledger().tokens == {"produced": 20}
    buffer.learner.claim(1, 1, policy_version=9, max_lag=3)  # sweeps group 0
    buffer.learner.settle(1)
    buffer.learner.drop([2], "poison")
    ledger = buffer.learner.ledger()
    assert ledger.tokens == {"produced": 20, "dropped:too_old": 8, "trained": 8, "dropped:poison": 4}
    assert ledger.turns == {"produced": 5, "dropped:too_old": 2, "trained": 2, "dropped:poison": 1}
    assert ledger.duration_ms == {"produced": 500, "dropped:too_old": 200, "trained": 200, "dropped:poison": 100}


def test_every_episode_that_ends_is_booked_with_what_it_earned_once_whatever_becomes_of_its_group(
    buffer: Views, run_id: str
) -> None:
    """Group 0 is trained, 1 is swept as too old, 2 fails before it is whole, 3 begins again.

    A partial is not counted as a trajectory.
    """
    for group_id, policy_version, reward in ((0, 9, 1.0), (1, 5, 0.25), (2, 9, 0.1), (3, 9, 0.0)):
        buffer.learner.open([ticket(group_id, env="grid" if group_id == 1 else "shop")])
        lease = leased(buffer)
        for member in [0] if group_id == 2 else [0, 1]:
            attempt = earning(attempt_at(lease, member, run_id=run_id, policy_version=policy_version), reward)
            buffer.actor.insert(lease, attempt)
            assert buffer.actor.insert(lease, attempt) is InsertResult.DUPLICATE
        if group_id == 2:
            buffer.actor.hand_in(lease, partial_of(lease, 1, run_id=run_id))
    assert buffer.people.requeue([3]) == 1
    buffer.learner.claim(1, 1, policy_version=9, max_lag=3)
    buffer.learner.settle(1)
    buffer.learner.drop([2], "env_failure")
    ledger = buffer.learner.ledger()
    assert ledger.dropped_trajectories == {"too_old": 2, "env_failure": 1, "requeued": 2}
    assert ledger.episodes == {"shop": 5, "grid": 2}
    assert ledger.successes == {"shop": 2}
    assert ledger.returns == pytest.approx({"shop": 2.1, "grid": 0.5}, rel=1e-15)


@pytest.mark.parametrize("reward", [-MAX_REWARD, 1e-9, MAX_REWARD])
def test_returns_of_any_size_are_booked(buffer: Views, run_id: str, reward: float) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    for member in (0, 1):
        buffer.actor.insert(lease, earning(attempt_at(lease, member, run_id=run_id), reward))
    assert buffer.learner.ledger().returns == pytest.approx({"shop": 2 * reward}, rel=1e-15)


@pytest.mark.parametrize(("duration_s", "booked_ms"), [(-1.0, 0), (float("nan"), 0), (1e300, 10**12)])
def test_a_clock_that_is_wrong_spoils_no_books(buffer: Views, run_id: str, duration_s: float, booked_ms: int) -> None:
    buffer.learner.open([ticket(0, num_members=1)])
    lease = leased(buffer)
    attempt = msgspec.structs.replace(attempt_at(lease, 0, run_id=run_id), duration_s=duration_s)
    assert buffer.actor.insert(lease, attempt) is InsertResult.STORED
    assert buffer.learner.ledger().duration_ms == ({"produced": booked_ms} if booked_ms else {})


def test_a_learner_is_told_that_the_server_forgot_the_run(
    buffer: Views, redis_client: redis.Redis, run_id: str
) -> None:
    """A learner without a checkpoint does this when it starts again: no one would claim groups that no one plays."""
    buffer.learner.open([ticket(0)])
    redis_client.delete(*redis_client.scan_iter(f"slipstream:{{{run_id}}}*"))
    with pytest.raises(RunForgotten, match=r"has lost run .* Start the learner again"):
        buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    buffer.learner.acquire_epoch()
    assert buffer.learner.open([ticket(0)]) == 1


def test_scripts_survive_a_server_that_forgot_them(buffer: Views, redis_client: redis.Redis, run_id: str) -> None:
    buffer.learner.open([ticket(0)])
    lease = leased(buffer)
    redis_client.script_flush()
    assert buffer.actor.insert(lease, attempt_at(lease, 0, run_id=run_id)) is InsertResult.STORED
    redis_client.script_flush()
    assert buffer.actor.insert(lease, attempt_at(lease, 1, run_id=run_id)) is InsertResult.STORED
    redis_client.script_flush()
    assert ids(buffer.learner.claim(1, 1, policy_version=0, max_lag=0)) == [0]


def test_a_full_server_makes_inserts_wait_and_still_drains(tmp_path: Path, run_id: str) -> None:
    with start_server(tmp_path) as server, connect(server.admin_url) as client:
        buffer = make_buffer(client, run_id)
        buffer.learner.acquire_epoch()
        buffer.learner.open([ticket(0), ticket(1), ticket(2)])
        big = 60_000
        first, second = leased(buffer), leased(buffer)
        for member in (0, 1):
            trajectory = attempt_at(first, member, run_id=run_id, num_sampled=big)
            assert buffer.actor.insert(first, trajectory) is InsertResult.STORED
        client.config_set("maxmemory", 1 << 20)  # the two that are stored take more
        waiting = attempt_at(second, 0, run_id=run_id, num_sampled=big)
        assert buffer.actor.insert(second, waiting) is InsertResult.FULL
        assert buffer.actor.insert(first, trajectory) is InsertResult.DUPLICATE
        assert buffer.learner.ledger().inserted == 2 and buffer.audit() == []
        assert buffer.actor.heartbeat("a", [second]) == {1}
        third = leased(buffer)
        buffer.actor.fail(third, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="none of the memory's business")
        buffer.actor.release(third)
        assert buffer.learner.open([ticket(3)]) == 1
        assert ids(buffer.learner.claim(1, 1, policy_version=0, max_lag=0)) == [0]
        assert buffer.learner.settle(1) == 1
        client.config_set("maxmemory", 4 << 20)
        assert buffer.actor.insert(second, waiting) is InsertResult.STORED
        assert buffer.audit() == []
