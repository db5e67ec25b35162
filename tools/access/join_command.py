"""`slipstream access join`: print the one command that a new host of actors must be given."""

import os
import shlex
import sys
from urllib.parse import SplitResult, quote, urlsplit

from slipstream.common.config.config import Config, key_paths, value_of
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_FILE_VARIABLE, PASSWORD_VARIABLE, shown
from slipstream.common.process.imported import is_own
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.replay.fleet.roles import Role, user_of
from slipstream.tools.access.access_users import FleetOption
from slipstream.tools.terminal.loopback import is_loopback

# The GPUs belong to one host, and the transport is given. All other settings of `actors` are taken over.
NOT_TAKEN_OVER = ("actors.devices", "actors.transport")


def join_command(config: Config, *, options: FleetOption) -> int:
    """Print the command; to stderr, what the host needs besides: secrets, which are never in it, and your own code."""
    if not config.redis.url:
        raise ConfigError(
            "`redis.url` is empty; give the URL at which the new host reaches the run's server, as redis://HOST:6379"
        )
    url = _actors_url(config, options.fleet)
    transport = "pull" if config.actors.transport == "broadcast" else config.actors.transport  # it comes and goes
    print(shlex.join(["slipstream", "actors", *host_settings(config, transport=transport, redis_url=url)]))
    for need in _needs(config, urlsplit(url)):
        print(need, file=sys.stderr)
    return 0


def host_settings(config: Config, *, transport: str, redis_url: str) -> list[str]:
    """The settings of `slipstream actors` on a host that has neither a configuration file nor the run's folder."""
    settings, usual = {"redis.url": redis_url, "run.name": config.run.name, "actors.transport": transport}, Config()
    for key in key_paths():
        value = value_of(config, key)
        if key.startswith("actors.") and key not in NOT_TAKEN_OVER and value != value_of(usual, key):
            settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{key}={value}" for key, value in settings.items()]


def _actors_url(config: Config, fleet: str) -> str:
    """`redis.url` with the user that actors have there: the fleet's, or the actors', if there are users by role."""
    url, run_id = config.redis.url, config.run.name
    parts = urlsplit(url)
    if parts.scheme == "unix":
        raise ConfigError(
            f"`redis.url` {shown(url)} is a socket file, which other hosts cannot reach; start the learner with a "
            "Redis server of your own, as redis.url=redis://HOST:6379"
        )
    by_role = parts.username in {user_of(run_id, role) for role in Role}
    if not fleet and not by_role:
        return url
    address = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{quote(user_of(run_id, Role.ACTOR, fleet=fleet))}@{address}").geturl()


def _needs(config: Config, url: SplitResult) -> list[str]:
    """What the host must have besides the command, and what would keep it from joining, one line each."""
    needs = []
    if url.username or os.environ.get(PASSWORD_VARIABLE) or os.environ.get(PASSWORD_FILE_VARIABLE):
        whose = f"of the Redis user {url.username}" if url.username else "of Redis"
        needs.append(
            f"set on the host: {PASSWORD_VARIABLE}, the password {whose}; or {PASSWORD_FILE_VARIABLE}, a file with it"
        )
    if config.weights.key_file or os.environ.get(KEY_VARIABLE):
        needs.append(
            f"set on the host: {KEY_VARIABLE}, the content of {config.weights.key_file or 'the same variable'}"
        )
    if "ssl_ca_certs=" in url.query:
        needs.append("copy to the host: the file that ssl_ca_certs names, to the same path")
    names = [part.name for part in config.env.entries().values()]
    own = sorted(name.partition(":")[0] for name in {*names, config.env.action_format} if is_own(name))
    if own:
        needs.append(f"install on the host, the same as on the learner's: {', '.join(own)}")
    for key, host in (("redis.url", url.hostname or ""), ("weights.host", config.weights.host)):
        if is_loopback(host):
            needs.append(f"warning: `{key}` is {host}: only hosts that share this machine's network can join")
    return needs
