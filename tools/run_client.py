"""The servers of a run that is there already."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from common.config import Config
from common.config_error import ConfigError
from common.connection import check_servers, connect_shards
from replay.fleet import Fleet
from replay.keys import shard_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A server's share of a stream's groups."""

    client: redis.Redis
    index: int
    name: str  # what stands in its keys for the run's name


def shards_of(config: Config, *, stream: str) -> list[Shard]:
    """The shards of a stream; evaluations are on the first. Raises ConfigError, RedisUnreachable, UnknownRun."""
    if not config.redis.url:
        raise ConfigError(
            f"no run {config.run.name!r} under {config.run.root}/ and no `redis.url`; name the run by run.name, or say "
            "which Redis it is on, as in redis.url=redis://host:6379"
        )
    check_servers(config.redis.url, config.redis.shards)
    clients = connect_shards(config.redis.url, config.redis.shards)
    Fleet(clients[0], config.run.name).run_facts()
    return [
        Shard(client=client, index=index, name=shard_name(config.run.name, index))
        for index, client in enumerate(clients if stream == "train" else clients[:1])
    ]


def shard_of(shards: Sequence[Shard], group_id: int) -> Shard:
    """The one that the group lives on."""
    return shards[group_id % len(shards)]
