"""`slipstream envs serve`: host environments for actors on other hosts, and for other people's clients."""

import asyncio
import ipaddress
import logging
import sys

from common.config import Config
from common.config_error import ConfigError
from common.shutdown import Shutdown
from envhub.catalogue import ENVS, env_maker
from envhub.serving.env_pool import EnvPool, WorkerFailed
from envhub.remote.env_secret import SECRET_VARIABLE, read_secret
from envhub.serving.env_server import EnvServer

POLL_S = 0.1

log = logging.getLogger(__name__)


def serve_envs(config: Config) -> int:
    """Serve until told to end; return the exit code. Raises ConfigError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    shutdown, section = Shutdown(), config.env_server
    names = section.names or list(ENVS)
    try:
        for name in names:
            env_maker(name)
        secret = read_secret(section.key_file, option="env_server.key_file")
    except ValueError as error:
        raise ConfigError(str(error).replace("`env.name`", "`env_server.names`")) from None
    try:
        asyncio.run(_serve(config, names, secret, shutdown))
    except OSError as error:
        where = f"`env_server.host` {section.host} and `env_server.port` {section.port}"
        raise ConfigError(f"{where} cannot be bound: {error.strerror}; choose others") from None
    except WorkerFailed as error:
        log.error("%s", error)
        return 1
    return shutdown.exit_code


async def _serve(config: Config, names: list[str], secret: str, shutdown: Shutdown) -> None:
    section = config.env_server
    pool = EnvPool(
        num_processes=section.processes, max_episodes=section.max_episodes, step_timeout_s=config.env.step_timeout_s
    )  # fmt: skip
    server = EnvServer(pool, names=names, lease_s=section.lease_s, secret=secret)
    async with pool.running(), server.listening(section.host, section.port) as url:
        log.info("serving %s at %s", ", ".join(names), url)
        if not secret and not _is_loopback(section.host):
            log.warning("whoever reaches it may play; set %s or env_server.key_file", SECRET_VARIABLE)
        while not shutdown.requested.is_set():  # noqa: ASYNC110 - a signal handler sets it
            await asyncio.sleep(POLL_S)
        log.info("ending; %d episodes are let go", pool.num_episodes)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
