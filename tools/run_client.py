"""The server of a run that is there already."""

import redis

from common.config import Config, ConfigError
from common.connection import connect_or_explain
from replay.fleet import Fleet


def client_of(config: Config) -> redis.Redis:
    """A client of the run's server. Raises ConfigError, RedisUnreachable, UnknownRun."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    client = connect_or_explain(config.redis.url)
    Fleet(client, config.run.name).run_facts()
    return client
