"""What an actor's heartbeats say of its slots."""

import dataclasses
import time

import pytest

from slipstream.actors.group.group import Episodes
from slipstream.actors.host.beat import Pulse
from slipstream.actors.host.refresh import RefreshCounts
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.process.shutdown import Shutdown
from tests.actors.group.test_group import Actor

SLOTS = 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_in_slots_is_that_of_each_episode_with_a_slot(clock: list[float]) -> None:
    episodes = Episodes(max_running=SLOTS)
    with episodes.running():
        clock[0] += 3.0  # one episode
        with episodes.running(), episodes.running():
            clock[0] += 5.0  # three episodes have two slots
            with episodes.aside():
                clock[0] += 1.0  # as two do
            assert episodes.slot_s() == 3.0 + 2 * 5.0 + 2 * 1.0
    clock[0] += 7.0
    assert (episodes.slot_s(), episodes.num_running) == (15.0, 0)


def test_a_heartbeat_says_how_many_slots_were_used_since_the_one_before(clock: list[float]) -> None:
    """Not how many are used at its moment: between two groups of short episodes, that is often a few less."""
    episodes = Episodes(max_running=SLOTS)
    setup = dataclasses.replace(Actor("a", "run").setup, episodes=episodes)
    pulse = Pulse(setup, counts=RefreshCounts(), actors=ActorsConfig(), shutdown=Shutdown())
    with episodes.running():
        clock[0] += 3.0
    clock[0] += 1.0
    beats = [pulse.member()]
    with episodes.running(), episodes.running():
        clock[0] += 2.0
        beats.append(pulse.member())
    assert [(beat.used_slots, beat.num_episodes) for beat in beats] == [(0.75, 0), (2.0, 2)]
