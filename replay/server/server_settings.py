"""The settings of a run's own Redis server: the file redis.conf, its options, its users and its addresses."""

import hashlib
import secrets
import socket
from pathlib import Path
from urllib.parse import quote

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import write_whole

# fsync always: with everysec, writes wait in the process during a sync, and a kill then loses acknowledged writes.
_CONFIG = """\
bind 127.0.0.1
protected-mode yes
port {port}
requirepass {password}
daemonize no
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
"""
# Commands that no client with the run's password needs. With CONFIG or MODULE a client can run programs.
REFUSED = (
    *("config", "debug", "module", "acl", "shutdown"),
    *("replicaof", "slaveof", "sync", "psync", "migrate", "failover"),
)
# Replies that a client does not read fill the memory; before 6.2.18 even a client without a password can cause this.
# Our clients have at most eight payloads in flight. On loopback, any user of the machine can open many such
# connections: `start_private_server` prevents that. Redis's default of 10,000 clients is too few for thousands of
# actors, which have several connections each; Redis lowers the number to what its limit of open files allows.
LIMITS = ("--client-output-buffer-limit", "normal", "512mb", "64mb", "5", "--maxclients", "100000")


def port_and_password(config: Path) -> tuple[int, str]:
    """The port and the password in `config`, which the first start writes. Raises ConfigError if it has none."""
    if config.exists():
        lines = config.read_text(errors="replace").splitlines()
        settings = {name: value for name, _, value in (line.partition(" ") for line in lines)}
        port, password = settings.get("port", ""), settings.get("requirepass", "")
        if not (port.isdecimal() and password):
            raise ConfigError(
                f"{config} must have the lines `port NUMBER` and `requirepass PASSWORD`; write them into it, or remove "
                "it: the next start writes others, and the data stay"
            )
        return int(port), password
    free, made = free_port(), secrets.token_hex(16)
    write_whole(config, _CONFIG.format(port=free, password=made))
    return free, made


def listening(address: int | Path) -> list[str]:
    """The options that make the server listen on `address` only."""
    if isinstance(address, int):
        return ["--port", str(address)]
    return ["--port", "0", "--unixsocket", str(address), "--unixsocketperm", "700"]


def only_user(password: str) -> list[str]:
    """The option for the only user, who may run every command but the refused. It contains only the password's hash."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return ["--user", "default", "on", f"#{hashed}", "~*", "&*", "+@all", *(f"-{command}" for command in REFUSED)]


def redis_url(address: int | Path, *, credentials: str = "") -> str:
    if isinstance(address, int):
        return f"redis://{credentials}127.0.0.1:{address}/0"
    return f"unix://{credentials}{quote(str(address))}"


def free_port(wanted: int = 0) -> int:
    """`wanted` if it is free on loopback, else any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
