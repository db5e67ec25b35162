"""`slipstream drill`: its link, its faults on a real run, and that its report tells what was lost."""

from pathlib import Path

import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.replay.server.redis_server import Server
from slipstream.tools.drill.books import what_is_lost
from slipstream.tools.drill.drill import drill, prepare
from slipstream.tools.run.link import Link
from tests.processes import GUESS
from tests.replay.records.attempts import Views, fill, leased, make_buffer, ticket


@pytest.fixture
def config(run_id: str, tmp_path: Path) -> Config:
    """Of a run that made two steps of one group each, whose archive `archive_steps` writes."""
    return load_config(None, [f"run.name={run_id}", f"run.root={tmp_path}"])


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    """Four groups are stored; two are trained, of the others one is ready and one was dropped by the learner's wish."""
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(group_id) for group_id in range(4)])
    for _ in range(4):
        fill(buffer, leased(buffer), run_id)
    return buffer


def train(buffer: Views, step: int) -> Group:
    (group,) = buffer.learner.claim(step, 1, policy_version=0, max_lag=0)
    return group


def archive_steps(config: Config, *groups: Group) -> None:
    folder = RunDir(config.run.root, config.run.name).trajectories
    writer = ArchiveWriter(folder, config.run.name, epoch=1)
    for step, group in enumerate(groups, start=1):
        writer.append(ArchivedStep(step=step, policy_version=0, conditions={}, groups=[group]))
    writer.sync()


def test_of_a_run_in_order_nothing_is_lost(buffer: Views, config: Config, redis_client: redis.Redis) -> None:
    archive_steps(config, train(buffer, 1), train(buffer, 2))
    buffer.learner.drop([train(buffer, 3).ticket.group_id], "zero_variance")
    buffer.learner.settle(2)
    assert what_is_lost(redis_client, config, last_step=2) == []


def test_what_was_lost_given_up_or_trained_twice_is_said(buffer: Views, config: Config, run_id: str) -> None:
    first = train(buffer, 1)
    archive_steps(config, first, first)
    buffer.learner.drop([train(buffer, 2).ticket.group_id], "lease_expired")
    payload = next(buffer.client.scan_iter(match=f"{key(run_id, 'train')}:blob:*", count=1000))
    buffer.client.delete(payload)
    *contradictions, given_up, missing, twice = what_is_lost(buffer.client, config, last_step=3)
    assert contradictions
    assert given_up == "1 groups were given up: lease_expired"
    assert missing == "step 3 is not in the archive"
    assert twice == f"group {first.ticket.group_id} was trained 2 times"


def test_a_link_passes_everything_on_and_nothing_while_it_is_cut(redis_server: Server) -> None:
    with Link(redis_server.port) as link:
        url = f"redis://:{redis_server.password}@127.0.0.1:{link.port}/0"
        with connect(url, patience_s=60) as through, connect(redis_server.secret_url) as direct:
            name = f"link-{link.port}"
            through.set(name, b"x" * 1_000_000)
            assert through.strlen(name) == direct.strlen(name) == 1_000_000
            link.is_cut = True
            patient = connect(url, patience_s=0)
            patient.get_connection_kwargs()["socket_timeout"] = 0.2
            with patient, pytest.raises(redis.ConnectionError):
                patient.set(name, "never")
            assert link.num_held > 0 and direct.strlen(name) == 1_000_000
            link.is_cut = False
            assert through.delete(name) == 1


def test_a_drill_wants_faults_that_there_are_and_a_run_and_a_redis_of_its_own(config: Config) -> None:
    with pytest.raises(ConfigError, match="`--fault` must be one of kill, stop, slow, partition, redis, preempt, got"):
        drill(config, faults=["kill", "flood"])
    config.redis.url = "redis://127.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"`redis.url` must be empty"):
        prepare(config)
    RunDir(config.run.root, config.run.name).create()
    with pytest.raises(ConfigError, match="exists"):
        prepare(config)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_drill_on_a_real_run_loses_nothing(
    config: Config, run_id: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two vLLM actors and a learner, and nothing to earn.

    `kill`, `partition` and `redis` are left to tests/whole/test_faults.py and tests/whole/test_elastic.py.
    """
    settings = [f"run.name={run_id}", f"run.root={tmp_path}", *GUESS, "env.options={step_s: 0.3, worth: 0}"]
    config = load_config(None, settings)
    code = drill(config, faults=["stop", "preempt"])
    said = capfd.readouterr().out
    assert code == 0, said
    assert said.splitlines()[-1] == "lost: nothing"
    for words in ("leases expired, and others got them", "the host left with code 75"):
        assert words in said
