"""Connects to the Redis servers of an existing run."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from slipstream.actors.host.join import run_config
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import check_servers, connect, connect_shards
from slipstream.common.process.redis_retry import PATIENCE_S
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.keys import shard_name
from slipstream.tools.see.runs import check_running, trains_alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One Redis server, and its share of the groups of a stream."""

    client: redis.Redis
    index: int
    name: str  # used in its keys in the place of the run's name


def clients_of(config: Config, *, patience_s: float = PATIENCE_S) -> list[redis.Redis]:
    """One client per Redis server of the run. Raises ConfigError, RedisUnreachable, UnknownRun."""
    url = config.redis.url
    if not url and (run_dir := RunDir(config.run.root, config.run.name)).config.is_file():
        if trains_alone(config):
            raise ConfigError(
                f"run {config.run.name!r} in {run_dir.path} has no Redis server, as it trains without actors; "
                f"`slipstream top {config.run.name}` shows how far it is"
            )
        raise ConfigError(
            f"run {config.run.name!r} in {run_dir.path} has no Redis server: its `redis.url` is empty; start one with "
            f"`slipstream up --resume {config.run.name}`, or name its Redis as redis.url=redis://host:6379"
        )
    if not url:
        raise ConfigError(
            f"no run {config.run.name!r} under {config.run.root}/ and `redis.url` is empty; give the run as run.name, "
            "or its Redis as redis.url=redis://host:6379"
        )
    check_running(config)
    check_servers(url, [])
    with connect(url) as client:
        shards = run_config(Fleet(client, config.run.name).run_facts()).redis.shards
    check_servers(url, shards)
    return connect_shards(url, shards, patience_s=patience_s)


def shards_of(config: Config, *, stream: str) -> list[Shard]:
    """The shards of a stream; evaluations are on the first. Raises ConfigError, RedisUnreachable, UnknownRun."""
    clients = clients_of(config)
    return [
        Shard(client=client, index=index, name=shard_name(config.run.name, index))
        for index, client in enumerate(clients if stream == "train" else clients[:1])
    ]


def shard_of(shards: Sequence[Shard], group_id: int) -> Shard:
    """The shard that has the group."""
    return shards[group_id % len(shards)]
