"""`slipstream top`: watch a run in the terminal, from anywhere that reaches its Redis and its directory."""

from rich.live import Live

from common.config import Config, ConfigError
from common.connection import RedisUnreachable, connect_or_explain
from common.run_dir import RunDir
from common.shutdown import Shutdown
from replay.fleet import Fleet, UnknownRun
from tools.view import View

REFRESH_S = 1.0


def top(config: Config) -> int:
    """Show the run until Ctrl-C."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; `slipstream up` prints the URL of the server that it started")
    try:
        client = connect_or_explain(config.redis.url)
        Fleet(client, config.run.name).run_facts()
    except (RedisUnreachable, UnknownRun) as error:
        raise ConfigError(str(error)) from None
    shutdown = Shutdown()
    view = View(client, RunDir(config.run.root, config.run.name), config.run.name, num_steps=config.learner.steps)
    with Live(view.render(), auto_refresh=False, screen=False) as live:
        while not shutdown.requested.wait(REFRESH_S):
            live.update(view.render(), refresh=True)
    return 0
