"""An actor that plays an evaluation stays at its version; weights that are newer wait, training episodes do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis

from slipstream.actors.host.pin import Pin
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.transfer.weights import Offer
from slipstream.learner.lead.evaluation import drop_open_groups
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunState
from tests.actors.group.test_group import Actor, acting, gate
from tests.learner.publisher.offers import empty_offer
from tests.processes import Gate
from tests.replay.records.attempts import Views, make_buffer, ticket
from tests.waiting import until

__all__ = ["gate"]  # a fixture
TURNS = 3


class Scene:
    """A run with evaluations and training groups, and one actor of it in this process, served from version 0."""

    def __init__(self, client: redis.Redis, run_id: str, gate: Gate, shutdown: Shutdown) -> None:
        """Every turn waits for `gate`."""
        self.gate, self._shutdown = gate, shutdown
        self.train, self.evaluations = make_buffer(client, run_id), make_buffer(client, run_id, stream="eval")
        self._epoch = self.train.learner.acquire_epoch()
        self.evaluations.learner.adopt_epoch(self._epoch)
        self.actor = Actor("actor", run_id, turns=TURNS, gate=str(gate))
        self._fleet, self._bulletin = Fleet(client, run_id), Bulletin(client, run_id)

    @property
    def version(self) -> int:
        return self.actor.engine.policy_version

    def opens(self, buffer: Views, *group_ids: int, version: int = 0, preferred: int = 0) -> None:
        versions = {"min_policy_version": version, "preferred_policy_version": preferred}
        buffer.learner.open(ticket(group_id, num_members=1, **versions) for group_id in group_ids)

    def announces(self, version: int) -> None:
        self._bulletin.announce(empty_offer(version, learner_epoch=self._epoch, root=str(version)))

    async def offers(self, version: int) -> None:
        """Announce the version, and return once the actor has staged it or serves it."""
        self.announces(version)
        await until(lambda: version in (self.actor.engine._staged_version, self.version))

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """The actor plays, with room for three episodes, until the run is over behind this."""
        buffers, room = {"eval": self.evaluations.actor, "train": self.train.actor}, ActorsConfig(max_episodes=3)
        task = asyncio.create_task(acting(self.actor, self.train, self._shutdown, buffers=buffers, actors=room))
        yield
        self._fleet.set_run_state(RunState.FINISHED)
        assert await task == 0


@pytest.fixture
def scene(redis_client: redis.Redis, run_id: str, gate: Gate, shutdown: Shutdown) -> Scene:
    return Scene(redis_client, run_id, gate, shutdown)


def episodes(buffer: Views, number: int) -> list[Trajectory]:
    return [group.trajectories[0] for group in buffer.learner.claim(1, number, policy_version=0, max_lag=0)]


def versions(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.oldest_policy_version, trajectory.newest_policy_version


async def test_an_evaluation_is_of_one_version_though_weights_come_and_training_goes_on(scene: Scene) -> None:
    scene.opens(scene.evaluations, 0, 1, 2, 3)
    scene.opens(scene.train, 0, 1)
    async with scene.playing():
        await until(lambda: len(scene.actor.seeds) == 3)  # all episodes stand in their first turn
        assert (scene.evaluations.ledger.leased, scene.train.ledger.leased) == (1, 2), "few evaluations beside training"
        await scene.offers(1)
        await scene.offers(2)
        assert scene.version == 0
        scene.gate.open()
        await until(lambda: scene.version == 2)
        assert scene.evaluations.ledger.ready == 4  # not before the last of them was over
        await until(lambda: scene.train.ledger.ready == 2)
    assert [versions(episode) for episode in episodes(scene.evaluations, 4)] == [(0, 0)] * 4
    assert scene.evaluations.audit() == [] == scene.train.audit()


async def test_evaluations_take_all_the_room_while_there_is_no_training(scene: Scene) -> None:
    scene.opens(scene.evaluations, 0, 1, 2, 3)
    async with scene.playing():
        await until(lambda: scene.evaluations.ledger.leased == 3)
        scene.gate.open()


async def test_an_evaluation_of_another_version_waits_until_the_actor_gets_there(scene: Scene) -> None:
    scene.gate.open()
    scene.opens(scene.evaluations, 0, version=5)
    scene.opens(scene.train, 0)
    async with scene.playing():
        await until(lambda: scene.train.ledger.ready == 1)
        assert scene.evaluations.ledger.queued == 1
        await scene.offers(5)
        await until(lambda: scene.evaluations.ledger.ready == 1)
        scene.opens(scene.evaluations, 1, version=4)
        await scene.offers(6)
        await until(lambda: scene.version == 6)  # an evaluation that it cannot play holds nothing up
    assert [versions(episode) for episode in episodes(scene.evaluations, 1)] == [(5, 5)]
    assert scene.evaluations.ledger.queued == 1


async def test_an_evaluation_that_takes_the_place_of_one_that_was_passed_over_is_played(scene: Scene) -> None:
    """The run's last one, of the version that the actors came to while one before it was still queued."""
    scene.gate.open()
    async with scene.playing():
        await scene.offers(1)
        await until(lambda: scene.version == 1)
        scene.opens(scene.evaluations, 0, version=0)
        await asyncio.sleep(0.3)  # some polls
        drop_open_groups(scene.evaluations.learner)
        scene.opens(scene.evaluations, 1, version=1)
        await until(lambda: scene.evaluations.ledger.ready == 1)


async def test_a_held_engine_takes_the_training_that_it_can_serve_and_no_other(scene: Scene) -> None:
    scene.opens(scene.evaluations, 0)
    async with scene.playing():
        await until(lambda: len(scene.actor.seeds) == 1)
        await scene.offers(1)
        scene.opens(scene.train, 0)
        await until(lambda: len(scene.actor.seeds) == 2)  # a training episode beside the evaluation
        scene.opens(scene.train, 1, version=1)
        await asyncio.sleep(0.3)  # some polls
        assert (scene.train.ledger.leased, scene.train.ledger.queued) == (1, 1)
        scene.gate.open()
        await until(lambda: scene.train.ledger.ready == 2)
    assert [versions(episode) for episode in episodes(scene.evaluations, 1)] == [(0, 0)]
    assert versions(episodes(scene.train, 2)[1]) == (1, 1)


async def test_a_group_waits_for_the_version_that_it_prefers_unless_the_engine_is_held(scene: Scene) -> None:
    async with scene.playing():
        await scene.offers(1)
        scene.opens(scene.train, 0, preferred=2)
        await until(lambda: scene.train.ledger.leased == 1)
        await asyncio.sleep(0.3)  # some polls
        assert len(scene.actor.seeds) == 0
        await scene.offers(2)
        await until(lambda: len(scene.actor.seeds) == 1)
        scene.opens(scene.evaluations, 0, version=2)
        await until(lambda: len(scene.actor.seeds) == 2)
        scene.opens(scene.train, 1, preferred=3)
        await until(lambda: len(scene.actor.seeds) == 3)
        scene.gate.open()
        await until(lambda: scene.train.ledger.ready == 2)
    assert [versions(episode)[0] for episode in episodes(scene.train, 2)] == [2, 2]


async def test_evaluations_that_are_dropped_under_an_actor_let_go_of_its_engine(scene: Scene) -> None:
    scene.opens(scene.evaluations, 0, 1)
    async with scene.playing():
        await until(lambda: len(scene.actor.seeds) == 2)
        await scene.offers(1)
        scene.evaluations.learner.drop([0, 1], "superseded")
        scene.opens(scene.evaluations, 2, version=9)
        await until(lambda: scene.version == 1)


async def test_without_weights_no_group_that_asks_is_held(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.actors.host.refresh.RETRY_S", 0.1)
    refused = asyncio.Event()
    scene.gate.open()
    stage = scene.actor.engine.stage

    async def refuse(offer: Offer) -> None:
        if not refused.is_set():
            await asyncio.sleep(0.5)
            refused.set()
        raise WeightsRefused("its host is cut off from the publisher")

    async with scene.playing():
        scene.opens(scene.train, 0, version=1)
        await asyncio.sleep(0.5)  # some polls
        assert scene.train.ledger.leased == 0
        await scene.offers(1)
        await until(lambda: scene.train.ledger.ready == 1)
        scene.opens(scene.train, 1, version=2)
        await until(lambda: scene.train.ledger.leased == 1)  # they may come at any moment
        scene.actor.engine.stage = refuse  # type: ignore[method-assign]
        scene.announces(2)
        await asyncio.wait_for(refused.wait(), 60)
        await until(lambda: scene.train.ledger.leased == 0)
        await asyncio.sleep(0.3)  # some polls
        assert (scene.train.ledger.leased, scene.train.ledger.queued) == (0, 1)
        scene.actor.engine.stage = stage  # type: ignore[method-assign]
        await until(lambda: scene.train.ledger.ready == 2)
    assert scene.train.ledger.failed == {}


def test_nothing_is_committed_while_an_evaluation_is_asked_for_nor_the_reverse() -> None:
    pin = Pin()
    with pin.leasing():
        assert pin.held
    assert not pin.held
    with pin.committing():
        assert not pin.may_lease(0)
    assert pin.may_lease(0)
    pin.took()
    pin.found_none()
    assert pin.held
    pin.ended()
    assert not pin.held
