"""`slipstream actors`: start this host's actors, keep them up, and take them down in order."""

import os
import socket
import sys
import tempfile
from pathlib import Path

from common.config import Config, dump_config
from common.config_error import ConfigError
from common.connection import connect_or_explain
from common.run_dir import RunDir
from common.shutdown import LEAVE_S, Shutdown
from tools.child import Child, say_last_words

POLL_S = 0.2
GRACE_S = LEAVE_S + 2.0  # after the drain; by then an actor has ended itself


def host_actors(config: Config) -> int:
    """Run `actors.count` actors until their run is over; return the exit code."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    connect_or_explain(config.redis.url).close()
    shutdown = Shutdown()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings:
        settings.write(dump_config(config))
        settings.flush()
        actors = [_actor(config, Path(settings.name), number) for number in range(config.actors.count)]
        for actor in actors:
            actor.start()
            print(f"actor {actor.name}: {actor.log}", flush=True)
        failed = _watch(actors, shutdown)
        for actor in actors:
            actor.ask_to_end()
        for actor in actors:
            actor.wait(config.actors.drain_s + GRACE_S)
        if failed:
            say_last_words("actors", failed)
            return failed.exit_code or 1
        return shutdown.exit_code


def _actor(config: Config, settings: Path, number: int) -> Child:
    name = f"{socket.gethostname()}-{os.getpid()}-{number}"
    return Child(
        name,
        [sys.executable, "-m", "actors", name, str(settings)],
        log=RunDir(config.run.root, config.run.name).log(f"actor-{number}"),
        environment={"OMP_NUM_THREADS": "1"},
    )


def _watch(actors: list[Child], shutdown: Shutdown) -> Child | None:
    """Keep the actors up until all are done or a signal asks to stop; return one that failed for good."""
    while any(actor.exit_code != 0 for actor in actors) and not shutdown.requested.wait(POLL_S):
        for actor in actors:
            if not actor.keep_up():
                return actor
    return None
