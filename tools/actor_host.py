"""`slipstream actors`: start this host's actors, keep them up, and take them down in order."""

import os
import socket
import sys
import tempfile
from pathlib import Path

from common.config import Config, ConfigError, dump_config
from common.connection import RedisUnreachable, connect_or_explain
from common.run_dir import RunDir
from common.shutdown import Shutdown, die_with_parent
from tools.child import Child

POLL_S = 0.2
GRACE_S = 5.0


def host_actors(config: Config) -> int:
    """Run `actors.count` actors until their run is over; return the exit code."""
    die_with_parent()
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    try:
        connect_or_explain(config.redis.url).close()
    except RedisUnreachable as error:
        raise ConfigError(str(error)) from None
    shutdown = Shutdown()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings:
        settings.write(dump_config(config))
        settings.flush()
        actors = [_actor(config, Path(settings.name), number) for number in range(config.actors.count)]
        for actor in actors:
            actor.start()
        return _supervise(actors, shutdown, config.actors.drain_s)


def _actor(config: Config, settings: Path, number: int) -> Child:
    name = f"{socket.gethostname()}-{os.getpid()}-{number}"
    return Child(
        name,
        [sys.executable, "-m", "actors", name, str(settings)],
        log=RunDir(config.run.root, config.run.name).log(f"actor-{number}"),
        environment={"OMP_NUM_THREADS": "1"},
    )


def _supervise(actors: list[Child], shutdown: Shutdown, drain_s: float) -> int:
    while any(actor.exit_code != 0 for actor in actors):
        if shutdown.requested.wait(POLL_S):
            for actor in actors:
                actor.ask_to_end()
            for actor in actors:
                actor.wait(drain_s + GRACE_S)
            return shutdown.exit_code
        for actor in actors:
            if not actor.keep_up():
                print(f"actor {actor.name} ended with {actor.exit_code}:\n{actor.last_words()}", file=sys.stderr)
                for other in actors:
                    other.ask_to_end()
                for other in actors:
                    other.wait(drain_s + GRACE_S)
                return actor.exit_code or 1
    return 0
