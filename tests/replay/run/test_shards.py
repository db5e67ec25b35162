"""Groups shared out over two servers: what each holds, what a step takes from each, and a run in which one dies."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from slipstream.actors.host.beat import BEAT_S, LastKnown, Leases, Pulse, keep_beating
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import RefreshCounts
from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable, check_servers, connect, connect_shards
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.supply.supplies import Supplies, shards_of, whole_batch
from slipstream.replay.buffer.audit import audit_shards
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.keys import epoch_key, key, shard_name
from slipstream.replay.run.server_shards import Shards, read_shards
from slipstream.replay.server.redis_server import Server, start_server
from slipstream.tools.replay.audit_table import audit
from tests.actors.group.test_group import Actor
from tests.learner.supply.test_supply import differ, work
from tests.processes import GUESS, PLAYED_BY_OTHERS, Run, nothing_runs
from tests.replay.buffer.every_verb import FACTS
from tests.replay.records.attempts import Views, make_buffer, ticket
from tests.several_ranks import SeveralRanks
from tests.waiting import until, wait_until

START = Progress(step=0, policy_version=0, highest_published=0, next_group_id=0, tokens_trained=0)


@pytest.fixture
def buffers(redis_client: redis.Redis, run_id: str) -> list[Views]:
    """Two shards on one server, under two hash tags."""
    return [make_buffer(redis_client, run_id, shard=shard) for shard in range(2)]


def learners(buffers: list[Views]) -> list[LearnerBuffer]:
    return [buffer.learner for buffer in buffers]


def test_each_shard_gives_its_share_of_a_step(
    redis_client: redis.Redis, buffers: list[Views], run_id: str, shutdown: Shutdown
) -> None:
    config = load_config(
        None,
        [
            f"run.name={run_id}",
            "replay.group_size=2",
            "replay.groups_per_step=4",
            "replay.target_lag=1",
            "redis.shards=['']",
            "env.num_train_tasks=50",
        ],
    )
    shards = Shards(learners(buffers))
    shards.acquire_epochs()
    supplies = Supplies(dict(enumerate(learners(buffers))), config, progress=START)
    stopping = Shutdown()
    stopping.requested.set()
    assert supplies.next_batch(START, stopping) is None  # no actor has worked yet
    for supply in supplies._supplies:
        supply.admit(1, [], published_version=0)
    opened = [{lease.ticket.group_id for lease in work(buffer, returns=differ)} for buffer in buffers]
    assert opened == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    batch = supplies.next_batch(START, shutdown)
    assert batch is not None and [group.ticket.group_id for group in batch.groups] == [0, 1, 2, 3]
    assert batch.next_group_id > max(*opened[0], *opened[1])
    ledger = shards.ledger()
    assert (ledger.episodes, ledger.successes, ledger.returns) == ({"shop": 16}, {"shop": 8}, {"shop": 8.0})
    assert ledger.claimed == 4 and ledger.balanced and ledger == read_shards([redis_client] * 2, run_id)
    assert shards.settle(1) == 4 and shards.reopen(0) == 0
    assert [buffer.ledger.trained for buffer in buffers] == [2, 2]
    assert audit_shards([redis_client] * 2, run_id) == []
    redis_client.hincrby(key(f"{run_id}#1", "train", "counters"), "ready", 1)
    assert all(line.startswith("shard 1: ") for line in audit_shards([redis_client] * 2, run_id))


def test_two_ranks_read_a_shard_each_and_learn_from_both(
    redis_url: str, buffers: list[Views], run_id: str, tmp_path: Path
) -> None:
    Shards(learners(buffers)).acquire_epochs()
    ranks = SeveralRanks(be_one_of_two, redis_url, run_id, tmp_path, num_ranks=2)
    while ranks.running:
        for buffer in buffers:
            work(buffer, returns=differ)
        time.sleep(0.1)
    ranks.wait()
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"read": [0, 2], "learned": [0, 1, 2, 3]}, {"read": [1, 3], "learned": [0, 1, 2, 3]}]


def be_one_of_two(ranks: Ranks, redis_url: str, run_id: str, folder: str) -> None:
    rank, path = ranks.rank, Path(folder)
    config = load_config(
        None, [f"run.name={run_id}", "replay.group_size=2", "replay.groups_per_step=4", "redis.shards=['']"]
    )
    (shard,) = shards_of(rank, num_shards=2, num_ranks=2)
    with connect(redis_url) as client:
        buffer = LearnerBuffer(client, run_id, config.replay, vocab_size=100, shard=shard)
        buffer.adopt_epoch(int(client.get(epoch_key(shard_name(run_id, shard)))))
        part = Supplies({shard: buffer}, config, progress=START).next_batch(START, Shutdown())
        whole = whole_batch(part, num_shards=2, ranks=ranks)
        assert whole_batch(part if rank else None, num_shards=2, ranks=ranks) is None  # rank 0 was asked to stop
    ids = {
        name: [group.ticket.group_id for group in batch.groups] for name, batch in (("read", part), ("learned", whole))
    }
    (path / f"rank_{rank}.json").write_text(json.dumps(ids))


def test_ranks_read_disjoint_shards_and_group_ids_continue() -> None:
    assert [list(shards_of(rank, num_shards=5, num_ranks=2)) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert [list(shards_of(rank, num_shards=1, num_ranks=3)) for rank in range(3)] == [[0], [], []]


def test_a_resumed_learner_opens_no_group_twice(buffers: list[Views], run_id: str, shutdown: Shutdown) -> None:
    settings = [f"run.name={run_id}", "replay.groups_per_step=2", "replay.target_lag=0", "redis.shards=['']"]
    config = load_config(None, settings)
    Shards(learners(buffers)).acquire_epochs()
    for _ in range(2):
        supplies = Supplies(dict(enumerate(learners(buffers))), config, progress=START)
        for step in (1, 2):
            for supply in supplies._supplies:
                supply.admit(step, [], published_version=0)
        assert [buffer.ledger.last_group_id for buffer in buffers] == [0, 1]
        assert [buffer.ledger.opened for buffer in buffers] == [1, 1]


def test_shards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`replay.groups_per_step` must be a multiple of 3, got 8; a step takes"):
        load_config(None, ["redis.shards=['','']"])
    for shard in ("redis://:s3cret@other:6379", "redis://other:6379?password=s3cret"):
        with pytest.raises(ConfigError, match=r"`redis.shards` must be URLs without user and password") as refused:
            load_config(None, [f"redis.shards=['{shard}']"])
        assert "s3cret" not in str(refused.value)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers with one password."""
    with start_server(tmp_path / "first") as first:
        start_server(tmp_path / "second").stop()
        settings = tmp_path / "second" / "redis.conf"
        settings.write_text(re.sub("requirepass .*", f"requirepass {first.password}", settings.read_text()))
        with start_server(tmp_path / "second") as second:
            yield [first, second]


def test_a_server_that_is_named_twice_has_one_client(servers: list[Server]) -> None:
    first, second = servers
    clients = connect_shards(first.secret_url, ["", second.url, first.url])
    assert clients[0] is clients[1] is clients[3] and clients[2] is not clients[0]
    clients[2].set("where", "second")
    with connect(second.secret_url) as client:
        assert client.get("where") == b"second"
    for client in clients:
        client.close()


def test_a_shard_that_does_not_answer_is_named(servers: list[Server]) -> None:
    check_servers(servers[0].secret_url, ["", servers[1].url])
    with pytest.raises(RedisUnreachable, match=r"`redis.shards` redis://\*\*\*@127.0.0.1:1 does not answer"):
        check_servers(servers[0].secret_url, ["redis://127.0.0.1:1"])
    with pytest.raises(RedisUnreachable, match=r"`redis.shards` must be redis://host:port, .*got '127.0.0.1:1'"):
        connect_shards(servers[0].secret_url, ["127.0.0.1:1"])


def test_who_asks_about_a_run_looks_at_all_its_shards_and_hears_each_contradiction_once(
    servers: list[Server], run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD", servers[0].password)
    mine = [f"run.name={run_id}", f"redis.url={servers[0].url}"]
    config_yaml = dump_config(load_config(None, [*mine, f"redis.shards=[{servers[1].url}]"]))
    with connect(servers[0].url) as first, connect(servers[1].url) as second:
        Fleet(first, run_id).describe_run(msgspec.structs.replace(FACTS, config_yaml=config_yaml))
        second.hincrby(key(f"{run_id}#1", "train", "counters"), "queued", 5)
    assert audit(load_config(None, mine)) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert [line[:50] for line in told] == [
        "WRONG shard 1: the books count 5 queued, the recou",
        "WRONG shard 1: the books do not balance: {'opened'",
    ]


def test_a_still_server_costs_no_lease_on_another(servers: list[Server], run_id: str, shutdown: Shutdown) -> None:
    with connect(servers[0].secret_url) as healthy, connect(servers[1].secret_url) as still:
        buffers = {"train": make_buffer(healthy, run_id).start(ticket(0)), "train#1": make_buffer(still, run_id)}
        fleet = Fleet(healthy, run_id)
        fleet.set_run_state(RunState.TRAINING)
        actor = Actor("actor", run_id)
        pulse = Pulse(actor.setup, counts=RefreshCounts(), actors=ActorsConfig(), shutdown=shutdown)

        def deadline_ms() -> float:
            deadline = healthy.zscore(key(run_id, "train", "leased"), "0")
            assert isinstance(deadline, float)
            return deadline

        async def beat() -> None:
            lease, playing = actor.lease(buffers["train"]), asyncio.create_task(asyncio.sleep(3600))
            leases = Leases(playing={("train", 0): (lease, playing)})
            beating = asyncio.create_task(
                keep_beating(
                    pulse,
                    actor="actor",
                    buffers={name: buffer.actor for name, buffer in buffers.items()},
                    fleet=fleet,
                    last_known=LastKnown(fleet, 120.0, play_root=""),
                    leases=leases,
                    interval=PollInterval(),
                )
            )
            leased_until = deadline_ms()
            await until(lambda: deadline_ms() > leased_until)
            servers[1].process.send_signal(signal.SIGSTOP)
            try:
                leased_until = deadline_ms()
                await until(lambda: deadline_ms() > leased_until + 4000 * BEAT_S)
            finally:
                servers[1].process.send_signal(signal.SIGCONT)
            assert not playing.cancelled()
            fleet.set_run_state(RunState.FINISHED)
            await beating
            playing.cancel()

        asyncio.run(beat())


@pytest.mark.timeout(900)
def test_a_run_on_two_servers_outlives_the_death_of_one(servers: list[Server], run_id: str, tmp_path: Path) -> None:
    num_steps = 12
    settings = [
        *GUESS,
        *PLAYED_BY_OTHERS,
        f"redis.shards=[{servers[1].url}]",
        "env.options={step_s: 0.05}",
        f"learner.steps={num_steps}",
        "learner.checkpoint_every=4",
        "replay.max_lag=1000",
    ]
    with Run(run_id, root=tmp_path, server=servers[0], settings=settings) as run:
        learner, actor = run.start_learner(), run.start_scripted_actor("actor")
        run.wait_until(lambda: run.last_step() >= 3, "the third step")
        servers[1].process.kill()
        servers[1].process.wait()
        log = run.dir.log("test-learner")
        run.wait_until(lambda: f"Redis at redis://{servers[1].url[8:]} has not answered" in log.read_text(), "it waits")
        killed_at = run.last_step()
        assert killed_at < num_steps
        servers[1].keep_up()
        assert learner.wait() == 0
        assert actor.wait() == 0
        assert run.steps() == list(range(1, num_steps + 1))
        clients = [connect(server.secret_url) for server in servers]
        ledgers = [read_shards([run.client], run_id), read_shards(clients, run_id)]
        assert [ledger.trained for ledger in ledgers] == [2 * num_steps, 4 * num_steps]
        assert ledgers[1].balanced and audit_shards(clients, run_id) == []
        assert ledgers[1].opened == ledgers[1].trained + ledgers[1].dropped.get("zero_variance", 0)
        for client in clients:
            client.close()
        wait_until(lambda: nothing_runs(run_id))
