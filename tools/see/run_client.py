"""Connects to the Redis server of an existing run."""

import redis

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect, connect_or_explain
from slipstream.common.process.redis_retry import PATIENCE_S
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet
from slipstream.tools.see.runs import check_running, trains_alone


def client_of(config: Config, *, patience_s: float = PATIENCE_S) -> redis.Redis:
    """A client of the run's Redis server. Raises ConfigError, RedisUnreachable, UnknownRun."""
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
    with connect_or_explain(url) as client:
        Fleet(client, config.run.name).run_facts()
    return connect(url, patience_s=patience_s)
