"""The life of a group, calls that are sent twice, the books, and a server that forgets, fills up or is killed."""

from pathlib import Path

import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.common.records.trajectory import MAX_REWARD, Outcome
from slipstream.replay.records.keys import RunForgotten
from slipstream.replay.records.scripts import Script
from slipstream.replay.records.ticket import InsertResult
from slipstream.tools.lab.loopback_server import start_server
from tests.replay.records.attempts import Views, earning, leased, make_buffer, ticket


def test_a_group_goes_from_ticket_to_trained_and_leaves_no_key(buffer: Views) -> None:
    assert buffer.learner.open([ticket(0)]) == 1
    lease = leased(buffer)
    assert lease.missing == {0: 0, 1: 0}
    buffer.insert(lease, 1)
    assert buffer.claim() == []
    buffer.insert(lease, 0)
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert group.ticket == ticket(0)
    assert group.trajectories == [buffer.attempt(lease, 0), buffer.attempt(lease, 1)]
    assert buffer.learner.settle(1) == 1
    ledger = buffer.ledger
    assert (ledger.opened, ledger.trained, ledger.inserted, ledger.trained_trajectories) == (1, 1, 2, 2)
    assert ledger.balanced and buffer.audit() == []
    assert buffer.names("group") + buffer.names("blob") == []


def test_every_episode_is_booked_with_what_it_earned_once_whatever_becomes_of_its_group(buffer: Views) -> None:
    """Group 0 is trained, 1 is swept as too old, 2 fails before it is whole, 3 begins again.

    A partial is not counted as a trajectory.
    """
    for group_id, policy_version, reward in ((0, 9, 1.0), (1, 5, 0.25), (2, 9, 0.1), (3, 9, 0.0)):
        lease = buffer.begin(ticket(group_id, env="grid" if group_id == 1 else "shop"))
        for member in [0] if group_id == 2 else [0, 1]:
            attempt = earning(buffer.attempt(lease, member, policy_version=policy_version), reward)
            buffer.actor.insert(lease, attempt)
            assert buffer.actor.insert(lease, attempt) is InsertResult.DUPLICATE
        if group_id == 2:
            buffer.actor.hand_in(lease, buffer.partial(lease, 1))
    assert buffer.people.requeue([3]) == 1
    buffer.learner.claim(1, 1, policy_version=9, max_lag=3)
    buffer.learner.settle(1)
    buffer.learner.drop([2], "env_failure")
    ledger = buffer.ledger
    assert ledger.dropped_trajectories == {"too_old": 2, "env_failure": 1, "requeued": 2}
    assert ledger.episodes == {"shop": 5, "grid": 2}
    assert ledger.successes == {"shop": 2}
    assert ledger.returns == pytest.approx({"shop": 2.1, "grid": 0.5}, rel=1e-15)


@pytest.mark.parametrize("reward", [-MAX_REWARD, 1e-9, MAX_REWARD])
def test_returns_of_any_size_are_booked(buffer: Views, reward: float) -> None:
    buffer.earn(buffer.begin(ticket(0)), reward, reward)
    assert buffer.ledger.returns == pytest.approx({"shop": 2 * reward}, rel=1e-15)


@pytest.mark.parametrize(("duration_s", "booked_ms"), [(-1.0, 0), (float("nan"), 0), (1e300, 10**12)])
def test_a_clock_that_is_wrong_spoils_no_books(buffer: Views, duration_s: float, booked_ms: int) -> None:
    buffer.insert(buffer.begin(ticket(0, num_members=1)), duration_s=duration_s)
    assert buffer.ledger.duration_ms == ({"produced": booked_ms} if booked_ms else {})


def test_a_learner_is_told_that_the_server_forgot_the_run(buffer: Views) -> None:
    """A learner without a checkpoint does this when it starts again: no one would claim groups that no one plays."""
    buffer.learner.open([ticket(0)])
    buffer.client.delete(*buffer.client.scan_iter(f"slipstream:{{{buffer.run_id}}}*"))
    with pytest.raises(RunForgotten, match=r"has lost run .* Start the learner again"):
        buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    buffer.learner.acquire_epoch()
    assert buffer.learner.open([ticket(0)]) == 1


def test_scripts_survive_a_server_that_forgot_them(buffer: Views) -> None:
    lease = buffer.begin(ticket(0))
    buffer.client.script_flush()
    buffer.insert(lease, 0)
    buffer.client.script_flush()
    buffer.insert(lease, 1)
    buffer.client.script_flush()
    assert buffer.claim() == [0]


def test_a_script_that_is_forgotten_between_load_and_call_is_sent_again(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(redis_client, f"return '{run_id}'")
    sent: list[str] = []

    def load(text: str) -> None:
        sent.append(text)
        if len(sent) == 3:
            monkeypatch.undo()
            redis_client.script_load(text)

    monkeypatch.setattr(redis_client, "script_load", load)
    assert script(keys=["key"]) == run_id.encode()
    assert sent == 3 * [script.text]


def test_a_full_server_makes_inserts_wait_and_still_drains(tmp_path: Path, run_id: str) -> None:
    with start_server(tmp_path) as server, connect(server.admin_url) as client:
        buffer = make_buffer(client, run_id).start(ticket(0), ticket(1), ticket(2))
        big = 60_000
        first, second = leased(buffer), leased(buffer)
        buffer.insert(first, num_sampled=big)
        client.config_set("maxmemory", 1 << 20)  # the two that are stored take more
        waiting = buffer.attempt(second, 0, num_sampled=big)
        assert buffer.actor.insert(second, waiting) is InsertResult.FULL
        assert buffer.actor.insert(first, buffer.attempt(first, 1, num_sampled=big)) is InsertResult.DUPLICATE
        assert buffer.ledger.inserted == 2 and buffer.audit() == []
        assert buffer.actor.heartbeat("a", [second]) == {1}
        third = leased(buffer)
        buffer.actor.fail(third, 0, attempt=0, outcome=Outcome.ENV_FAILURE, reason="none of the memory's business")
        buffer.actor.release(third)
        assert buffer.learner.open([ticket(3)]) == 1
        assert buffer.claim() == [0]
        assert buffer.learner.settle(1) == 1
        client.config_set("maxmemory", 4 << 20)
        assert buffer.actor.insert(second, waiting) is InsertResult.STORED
        assert buffer.audit() == []
