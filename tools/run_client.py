"""The servers of a run that is there already."""

import redis

from common.config import Config, ConfigError
from common.connection import connect_or_explain, connect_shards
from replay.fleet import Fleet


def clients_of(config: Config) -> list[redis.Redis]:
    """A client of each of the run's shards. Raises ConfigError, RedisUnreachable, UnknownRun."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    connect_or_explain(config.redis.url).close()
    clients = connect_shards(config.redis.url, config.redis.shards)
    Fleet(clients[0], config.run.name).run_facts()
    return clients


def client_of(config: Config) -> redis.Redis:
    """A client of the run's first server, which has what concerns the whole run. Raises as `clients_of`."""
    return clients_of(config)[0]
