"""A synchronous step after a resume, and beside a quarantined group."""

from slipstream.learner.supply.supply import Supply
from slipstream.replay.records.ticket import Lease
from tests.learner.supply.test_supply import SYNCHRONOUS, Scene, config, scene
from tests.replay.records.attempts import ids, leased, make_buffer

__all__ = ["scene"]  # the fixture


def test_a_resumed_synchronous_learner_awaits_the_groups_of_the_one_before_it(scene: Scene) -> None:
    """Four groups are played for step 1 when its learner is killed, and the later ones are finished first."""
    killed = scene.supply(*SYNCHRONOUS)
    killed._taught += [False, False]
    killed.admit(1, [], published_version=0)
    leases = [leased(scene.buffer) for _ in range(4)]

    after = make_buffer(scene.buffer.client, scene.run_id).learner
    after.acquire_epoch()
    sleep = lambda _: scene.buffer.earn(leases.pop(), 0.0, 1.0)  # noqa: E731
    batch = scene.batch(Supply(after, config(*SYNCHRONOUS), first_group_id=0, sleep=sleep))
    assert ids(batch.groups) == [0, 1]
    ledger = after.ledger()
    assert (ledger.queued, ledger.leased, ledger.ready) == (0, 0, 0), "none is left for the next step"
    assert ledger.dropped == {"surplus": 2} == batch.num_dropped


def test_a_synchronous_step_leaves_a_quarantined_group_in_quarantine(scene: Scene) -> None:
    """Groups 0 and 2 teach nothing, so that five are opened. Group 4 is finished first, and its payload is poison."""
    leases = dict[int, Lease]()

    def finish_one(_: float) -> None:
        leases.update({lease.ticket.group_id: lease for lease in iter(lambda: scene.actor.lease("a"), None)})
        group_id = 4 if 4 in leases else min(leases)
        scene.buffer.earn(leases.pop(group_id), 0.0, float(group_id not in (0, 2)))
        if group_id == 4:
            for name in scene.buffer.names("blob:4"):
                scene.buffer.client.set(name, b"garbage")

    batch = scene.batch(scene.supply(*SYNCHRONOUS, sleep=finish_one))
    assert ids(batch.groups) == [1, 3]
    assert [found.group_id for found in scene.buffer.quarantined()] == [4]
    assert (scene.ledger.quarantined, scene.ledger.dropped) == (1, batch.num_dropped)
    assert scene.buffer.audit() == []
