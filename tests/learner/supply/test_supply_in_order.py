"""A synchronous step after a resume, and beside a quarantined group."""

import redis

from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.supply.supplies import Supplies
from slipstream.learner.supply.supply import Supply
from slipstream.replay.records.ticket import Lease
from tests.learner.supply.test_supply import config, shutdown
from tests.replay.records.attempts import Views, attempt_at, earning, leased, make_buffer

SYNCHRONOUS = ("replay.target_lag=0", "replay.max_lag=0", "learner.steps=9")

__all__ = ["shutdown"]  # a fixture


def finish(buffer: Views, lease: Lease, run_id: str, returns: tuple[float, float] = (0.0, 1.0)) -> None:
    for member, reward in enumerate(returns):
        buffer.actor.insert(lease, earning(attempt_at(lease, member, run_id=run_id), reward))


def all_leased(buffer: Views) -> list[Lease]:
    leases = []
    while (lease := buffer.actor.lease("a")) is not None:
        leases.append(lease)
    return leases


def test_a_resumed_synchronous_learner_awaits_the_groups_of_the_one_before_it(
    buffer: Views, redis_client: redis.Redis, run_id: str, shutdown: Shutdown
) -> None:
    """Four groups are played for step 1 when its learner is killed, and the later ones are finished first."""
    before = Supply(buffer.learner, config(*SYNCHRONOUS), first_group_id=0)
    before._taught += [False, False]
    before.admit(1, [], published_version=0)
    leases = [leased(buffer) for _ in range(4)]

    after = make_buffer(redis_client, run_id).learner
    after.acquire_epoch()
    start = Progress(step=0, policy_version=0, highest_published=0, next_group_id=0, tokens_trained=0)
    supplies = Supplies.begin({0: after}, config(*SYNCHRONOUS), progress=start)
    (supply,) = supplies._supplies
    supply._sleep = lambda _: finish(buffer, leases.pop(), run_id)
    batch = supplies.next_batch(start, shutdown)
    assert batch is not None and [group.ticket.group_id for group in batch.groups] == [0, 1]
    ledger = after.ledger()
    assert (ledger.queued, ledger.leased, ledger.ready) == (0, 0, 0), "none is left for the next step"
    assert ledger.dropped == {"surplus": 2} == batch.num_dropped


def test_a_synchronous_step_leaves_a_quarantined_group_in_quarantine(
    buffer: Views, redis_client: redis.Redis, run_id: str, shutdown: Shutdown
) -> None:
    """Groups 0 and 2 teach nothing, so that five are opened. Group 4 is finished first, and its payload is poison."""
    leases = dict[int, Lease]()

    def finish_one(_: float) -> None:
        leases.update({lease.ticket.group_id: lease for lease in all_leased(buffer)})
        group_id = 4 if 4 in leases else min(leases)
        finish(buffer, leases.pop(group_id), run_id, (0.0, float(group_id not in (0, 2))))
        if group_id == 4:
            for name in redis_client.scan_iter(f"{buffer.base}:blob:4:*"):
                redis_client.set(name, b"garbage")

    supply = Supply(buffer.learner, config(*SYNCHRONOUS), first_group_id=0, sleep=finish_one)
    batch = supply.next_batch(1, policy_version=0, published_version=0, shutdown=shutdown)
    assert batch is not None and [group.ticket.group_id for group in batch.groups] == [1, 3]
    assert [found.group_id for found in buffer.quarantined()] == [4]
    ledger = buffer.learner.ledger()
    assert (ledger.quarantined, ledger.dropped) == (1, batch.num_dropped)
    assert buffer.audit() == []
