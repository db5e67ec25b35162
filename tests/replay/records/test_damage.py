"""No damage to any key of a run in Redis ends, blocks or misleads a process of it: each reports it and continues."""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import Shutdown
from slipstream.replay.buffer.verbs import ACTORS, JUDGES
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import key
from tests.replay.records.attempts import make_buffer
from tests.replay.records.damage import Scene, damages, everyone_goes_on, honest_calls, lies, make_scene

NUM_DAMAGES = int(os.environ.get("SLIPSTREAM_DAMAGES", "4"))  # of each key, drawn; all kinds are some 900
# Every key of a run, as docs/replay.md lists them.
KEYS = """
    epoch epoch:request:* facts judge:spent state newest fleet fleet:deadlines fleet:wanted:* train:counters
    train:queued train:leased train:judging train:ready train:ready_by_version train:claimed train:quarantined
    train:group:* train:blob:* train:partial:* train:lease_request:* train:last_claim train:failures
    weights:latest weights:latest:versions weights:version weights:acknowledged:* weights:group:* weights:members
    weights:relays weights:relay:* weights:corrupt weights:invitation
"""


@pytest.fixture
def scene(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> Iterator[Scene]:
    with connect(redis_url, patience_s=0) as impatient:
        yield make_scene(redis_client, impatient, run_id, tmp_path)


def names_of(scene: Scene, pattern: str) -> list[bytes]:
    """The keys of the scene under a name of the catalogue."""
    wanted = re.compile(re.escape(f"{key(scene.run_id)}:{pattern}").replace(r"\*", ".*") + "$")
    return sorted(name for name in scene.dumps if wanted.match(name.decode()))


def test_the_catalogue_names_every_key_of_a_run(scene: Scene) -> None:
    assert {name for pattern in KEYS.split() for name in names_of(scene, pattern)} == set(scene.dumps)
    page = Path("docs/replay.md").read_text()
    assert [pattern for pattern in KEYS.split() if pattern.split(":*")[0].removeprefix("train:") not in page] == []


@pytest.mark.parametrize("pattern", KEYS.split())
def test_everyone_goes_on_after_any_damage_to_a_key(pattern: str, scene: Scene, shutdown: Shutdown) -> None:
    chance = random.Random(pattern)
    kinds = [(name, what, damage) for name in names_of(scene, pattern) for what, damage in damages(scene.client, name)]
    assert kinds
    for name, what, damage in chance.sample(kinds, min(NUM_DAMAGES, len(kinds))):
        scene.restore()
        learner = make_buffer(scene.client, scene.run_id).start().learner
        for command in damage:
            scene.client.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            everyone_goes_on(scene, learner, shutdown)
        except BaseException as error:
            error.add_note(f"{name.decode()}: {what}")
            raise


def test_nothing_that_an_actor_or_a_judge_says_stops_anybody_else(scene: Scene, shutdown: Shutdown) -> None:
    """Its payload is there, and one argument of a verb of its own is a lie."""
    told = list(lies(scene))
    assert {verb for _, verb, _, _ in told} == {*ACTORS, *JUDGES}
    for what, verb, keys, arguments in random.Random(4).sample(told, min(len(told), 12 * NUM_DAMAGES)):
        scene.restore()
        learner = make_buffer(scene.client, scene.run_id).start().learner
        if verb in ("insert", "hand_in"):
            scene.client.set(keys[1], b"payload", ex=60)
        script = scripts.load(scene.client, "prelude", "leases", "begin", verb)
        with contextlib.suppress(redis.ResponseError):  # it is the liar's
            script(keys=keys, args=arguments)
        try:
            everyone_goes_on(scene, learner, shutdown)
        except BaseException as error:
            error.add_note(what)
            raise


def test_a_result_that_is_none_is_refused_before_anything_is_written(scene: Scene) -> None:
    keys, (group_id, member, record, env, *_) = honest_calls(scene)["insert"]
    scene.client.set(keys[1], b"payload", ex=60)
    before, insert = contents(scene), scripts.load(scene.client, "prelude", "leases", "begin", "insert")
    numbers = ("nan", "inf", "-inf", "", "x")
    for result in [(), *((number, "1") for number in numbers), ("1.0", "2"), ("1.5", "yes"), ("1.0",)]:
        with pytest.raises(redis.ResponseError, match="malformed result"):
            insert(keys=keys, args=[group_id, member, record, env, *result])
            pytest.fail(f"{result} was accepted")
        assert contents(scene) == before


def contents(scene: Scene) -> dict[bytes, object]:
    names = scene.client.scan_iter(match=f"{key(scene.run_id)}:*", count=10_000)
    return {name: scene.client.dump(name) for name in names}
