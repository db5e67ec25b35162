"""`slipstream scale`: the number that it writes for a host, and the supervisor that follows it."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet, MemberState
from slipstream.tools.launch.scale import RAY, scale
from slipstream.tools.run.actor_host import Host, _follow
from tests.replay.buffer.every_verb import FACTS, MEMBER
from tests.waiting import wait_until

DEADLINE_S = 60.0


@pytest.fixture
def config(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> Config:
    """Of a run with three actors, on two hosts; a fourth is leaving."""
    fleet = Fleet(redis_client, run_id)
    fleet.describe_run(FACTS)
    for name, host in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "two")):
        state = MemberState.DRAINING if name == "d" else MemberState.SERVING
        fleet.beat(msgspec.structs.replace(MEMBER, name=name, host=host, state=state))
    own = [f"run.name={run_id}", f"run.root={tmp_path}", f"redis.url={redis_url}"]
    return load_config(None, [*own, "actors.count=2"])


def advise(config: Config, *numbers: int) -> None:
    run_dir = RunDir(config.run.root, config.run.name)
    run_dir.create()
    lines = [json.dumps({"step": step, "fleet/advised_actors": number}) for step, number in enumerate(numbers)]
    run_dir.metrics.write_text("\n".join([*lines, json.dumps({"step": 9, "eval/num_tasks": 2}), ""]))


def test_a_host_gets_the_difference_between_the_fleet_and_the_advised_number_and_rays_driver_the_number(
    config: Config, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(redis_client, config.run.name)
    advise(config, 3, 5)
    assert scale(config, to=None, host="one") == 0
    assert "5 actors are advised" in (said := capsys.readouterr().out) and "3 are running\none: 4 wanted" in said
    assert (fleet.wanted_actors("one"), fleet.wanted_actors("two")) == (4, None)
    advise(config, 1)
    scale(config, to=None, host="two")
    assert fleet.wanted_actors("two") == 1
    scale(config, to=7, host="two")
    assert fleet.wanted_actors("two") == 7
    advise(config, 7)
    for to, wanted in ((None, 7), (3, 3)):
        scale(config, to=to, host=RAY)
        assert fleet.wanted_actors(RAY) == wanted


def test_what_cannot_be_done_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="has no advised number of actors yet"):
        scale(config, to=None, host="one")
    with pytest.raises(ConfigError, match="has no actor on host three; give --host; hosts with actors: one, two"):
        scale(config, to=1, host="three")
    with pytest.raises(ConfigError, match="--to must be >= 1, got 0"):
        scale(config, to=0, host="one")


def test_a_supervisor_begins_with_its_own_number_and_follows_what_is_wanted_since(
    config: Config, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tools.run.actor_host.ASK_EVERY_S", 0.01)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    fleet = Fleet(redis_client, config.run.name)
    fleet.want_actors("one", 9)  # of the supervisor before it
    host = Host(config, lambda name: ["true", name], devices=[])
    ended = threading.Event()
    following = threading.Thread(target=_follow, args=[host, config, ended], daemon=True)
    following.start()
    wait_until(lambda: fleet.wanted_actors("one") is None, "the number of the supervisor before is forgotten")
    assert host.count == config.actors.count == 2
    scale(config, to=6, host="one")
    wait_until(lambda: host.count == 6, "the supervisor follows")
    ended.set()
    following.join(DEADLINE_S)
    assert not following.is_alive()
