"""How often actors ask Redis, in a small fleet and in one that is large for its server."""

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import redis

from slipstream.actors.host import act as act_module
from slipstream.actors.host import poll_interval
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import Shutdown
from slipstream.replay.buffer.repertoire import FILES
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import Lease
from slipstream.replay.server.redis_server import Server
from tests.actors.group.test_group import Actor, acting, gate
from tests.processes import Gate
from tests.replay.records.attempts import make_buffer, ticket
from tests.waiting import until

__all__ = ["gate"]  # a fixture
NUM_ACTORS = 10
MEASURED_S = 3.0


class Asked:
    """The requests of a run's actors, counted by kind from the server's own account of its commands."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.counts = Counter[str]()
        self._run_id = run_id
        self._verbs = {scripts.load(client, *files).sha: files[-1] for files in FILES}

    def count(self, command: dict[str, str]) -> None:
        words = command["command"].split()
        if command["client_type"] == "lua" or self._run_id not in command["command"]:
            return
        stream = re.search(rf"\{{{self._run_id}\}}:(train|eval) ", command["command"])
        if words[0] == "XREAD":
            name = "wait for an offer"
        else:
            name = self._verbs[words[1]] if words[0] == "EVALSHA" else words[-1].rpartition(":")[2]
        self.counts[f"{name} {stream[1]}" if stream else name] += 1


@contextmanager
def watching(server: Server, run_id: str) -> Iterator[Asked]:
    with connect(server.secret_url) as client, client.monitor() as monitor:
        asked, ended = Asked(client, run_id), key("end", run_id)

        def read() -> None:
            while ended not in (command := monitor.next_command())["command"]:
                asked.count(command)

        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield asked
        finally:
            client.exists(ended)
            reading.join()


class Scene:
    """A run that trains, with a queue of evaluations and one of training groups, both empty."""

    def __init__(self, client: redis.Redis, run_id: str, gate: Gate, shutdown: Shutdown) -> None:
        """Every turn waits for `gate`."""
        self.run_id, self.fleet = run_id, Fleet(client, run_id)
        self.streams = {stream: make_buffer(client, run_id, stream=stream) for stream in ("eval", "train")}
        for stream in self.streams.values():
            stream.learner.acquire_epoch()
        self._shutdown, self._gate = shutdown, gate

    def acts(self, number: int) -> asyncio.Task[int]:
        actor = Actor(f"actor-{number}", self.run_id, gate=str(self._gate))
        buffers, room = {name: stream.actor for name, stream in self.streams.items()}, ActorsConfig(max_episodes=16)
        return asyncio.create_task(acting(actor, self.streams["train"], self._shutdown, buffers=buffers, actors=room))


@pytest.fixture
def scene(redis_client: redis.Redis, run_id: str, gate: Gate, shutdown: Shutdown) -> Scene:
    return Scene(redis_client, run_id, gate, shutdown)


def test_the_interval_grows_with_the_fleet_between_its_bounds() -> None:
    assert [PollInterval(num_members=members).seconds(0.1) for members in (1, 500, 5000, 10**9)] == [0.1, 0.1, 1.0, 4.0]
    assert PollInterval(num_members=10**9).seconds(1.0, most_s=0.5) == 1.0


async def test_all_actors_keep_to_one_rate(redis_server: Server, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, ten idle actors would ask for a group 400 times a second."""
    monkeypatch.setattr(poll_interval, "ASKS_PER_S", 20.0)
    tasks = [scene.acts(number) for number in range(NUM_ACTORS)]
    await until(lambda: len(scene.fleet.members()) == NUM_ACTORS)
    with watching(redis_server, scene.run_id) as asked:
        await until(lambda: asked.counts["beat"] >= NUM_ACTORS)  # now each knows how many they are
        before, started = asked.counts.copy(), time.monotonic()
        await asyncio.sleep(MEASURED_S)
        counted, measured_s = asked.counts - before, time.monotonic() - started
    scene.fleet.set_run_state(RunState.FINISHED)
    await asyncio.gather(*tasks)
    most = {"wait for an offer": 20.0, "lease eval": 20.0, "lease train": 20.0, "beat": 10.0, "state": 10.0}
    assert counted.keys() <= most.keys()  # without a lease there is nothing to renew
    for kind, per_s in most.items():
        assert 0 < counted[kind] <= 1.4 * per_s * measured_s + NUM_ACTORS / 2, (kind, counted, measured_s)


async def test_a_small_fleet_asks_as_often_as_it_can_use(redis_server: Server, scene: Scene) -> None:
    scene.streams["train"].learner.open([ticket(0, num_members=2)])
    task = scene.acts(0)
    await until(lambda: scene.streams["train"].ledger.leased == 1)
    with watching(redis_server, scene.run_id) as asked:
        await until(lambda: asked.counts["beat"] >= 1)
        before = asked.counts.copy()
        await until(lambda: asked.counts["beat"] >= before["beat"] + 3)
        counted = asked.counts - before
    scene.fleet.set_run_state(RunState.FINISHED)
    await task
    assert counted["heartbeat train"] in (2, 3, 4) and "heartbeat eval" not in counted
    assert counted["wait for an offer"] >= 3 and counted["lease train"] > 30, counted


async def test_with_its_share_of_a_queue_it_lets_others_ask(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four groups it takes two at once, as there are two actors; those that the other leaves it takes one by one."""
    idle_s, events, fleet, train = 0.0123, list[str](), scene.fleet, scene.streams["train"]
    seconds, lease = PollInterval.seconds, train.actor.lease

    def noted_pause(interval: PollInterval, least_s: float, **limits: float) -> float:
        if least_s == idle_s and interval.num_members == 2:
            events.append("pause")
        return seconds(interval, least_s, **limits)

    def noted_lease(actor: str) -> Lease | None:
        if found := lease(actor):
            events.append(f"leased with {found.num_queued} left")
        return found

    monkeypatch.setattr(act_module, "IDLE_S", idle_s)
    monkeypatch.setattr(PollInterval, "seconds", noted_pause)
    monkeypatch.setattr(train.actor, "lease", noted_lease)
    task = scene.acts(0)
    await until(lambda: len(fleet.members()) == 1)
    fleet.beat(msgspec.structs.replace(fleet.members()[0], name="another"))
    await until(lambda: "pause" in events)
    train.learner.open([ticket(group_id, num_members=2) for group_id in range(4)])
    await until(lambda: train.ledger.leased == 4)
    scene.fleet.set_run_state(RunState.FINISHED)
    await task
    took = events[events.index("leased with 3 left") : events.index("leased with 0 left") + 1]
    three, two, one, none = (f"leased with {left} left" for left in (3, 2, 1, 0))
    assert took == [three, two, "pause", one, "pause", none]
