"""`slipstream top`: watch a run in the terminal, from anywhere that reaches its Redis and its directory."""

import contextlib

import redis
from rich.console import Console
from rich.live import Live

from actors.join import run_config
from common.config import Config
from common.config_error import ConfigError
from common.connection import check_servers, connect_shards
from common.run_dir import RunDir
from common.shutdown import Shutdown
from replay.fleet import Fleet
from tools.view import View

REFRESH_S = 1.0


def top(config: Config) -> int:
    """Show the run until Ctrl-C; once, where the output is no terminal."""
    if not config.redis.url:
        raise ConfigError(
            f"no run {config.run.name!r} under {config.run.root}/ and no `redis.url`; name the run by run.name, or the "
            "URL that `slipstream up` prints"
        )
    check_servers(config.redis.url, config.redis.shards)
    shards = connect_shards(config.redis.url, config.redis.shards, patience_s=0)
    run = run_config(Fleet(shards[0], config.run.name).run_facts())  # raises UnknownRun
    view = View(shards, RunDir(config.run.root, config.run.name), config.run.name, num_steps=run.learner.steps)
    console = Console()
    if not console.is_terminal:
        console.print(view.render(), soft_wrap=True)
        return 0
    shutdown = Shutdown()
    with Live(view.render(), console=console, auto_refresh=False) as live:
        while not shutdown.requested.wait(REFRESH_S):
            with contextlib.suppress(redis.RedisError):  # away for a moment: what is shown stays
                live.update(view.render(), refresh=True)
    return 0
