"""`slipstream serve envs`: serve environments to actors on other hosts, and to clients of other projects."""

import asyncio
import logging

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.shutdown import Shutdown
from slipstream.envhub.catalogue import ENVS, env_maker
from slipstream.envhub.remote.env_secret import SECRET_VARIABLE, read_secret
from slipstream.envhub.serving.env_pool import EnvPool, WorkerFailed
from slipstream.envhub.serving.env_server import EnvServer
from slipstream.tools.serve.serve_options import EnvsOptions
from slipstream.tools.terminal.loopback import is_loopback

POLL_S = 0.1

log = logging.getLogger(__name__)


def serve_envs(config: Config, *, options: EnvsOptions) -> int:
    """Serve until a signal; return the exit code. Raises ConfigError."""
    log_to_stderr()
    shutdown, names = Shutdown(), list(options.names) or list(ENVS)
    try:
        for name in names:
            env_maker(name)
        secret = read_secret(options.key_file, option="--key-file")
    except ValueError as error:
        raise ConfigError(str(error).replace("`env.name`", "`--names`")) from None
    try:
        asyncio.run(_serve(config, options, names, secret, shutdown))
    except OSError as error:
        where = f"`--host` {options.host} and `--port` {options.port}"
        raise ConfigError(f"{where} cannot be bound: {error.strerror}; choose others") from None
    except WorkerFailed as error:
        log.error("%s", error)
        return 1
    return shutdown.exit_code


async def _serve(config: Config, options: EnvsOptions, names: list[str], secret: str, shutdown: Shutdown) -> None:
    pool = EnvPool(
        num_processes=options.processes, max_episodes=options.max_episodes, step_timeout_s=config.env.step_timeout_s
    )
    server = EnvServer(pool, names=names, lease_s=options.lease_s, secret=secret)
    async with pool.running(), server.listening(options.host, options.port) as url:
        log.info("serving %s at %s", ", ".join(names), url)
        if not secret and not is_loopback(options.host):
            log.warning(
                "no authentication: any client that can connect may use the server; set %s or --key-file",
                SECRET_VARIABLE,
            )
        while not shutdown.requested.is_set():  # noqa: ASYNC110 - a signal handler sets it
            await asyncio.sleep(POLL_S)
        log.info("stopping; closing %d episodes", pool.num_episodes)
