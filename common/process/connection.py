"""Connects to Redis: the only place that sets timeouts, retries and reply formats."""

import ipaddress
import os
import re
import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

import redis

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.redis_retry import PATIENCE_S, Patience, RedisAway
from slipstream.common.process.shutdown import Flag

PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD_FILE"  # for a password in a mounted secret
CALL_TIMEOUT_S = 5.0
START_PATIENCE_S = 3.0  # enough for a server that is restarting; a wrong URL must be reported soon
NO_URL = "must be redis://host:port, rediss://host:port or unix://path, with / and @ in a password as %2F and %40"


class RedisUnreachable(ValueError):
    """No Redis server answers at the URL; the message says what to check."""


def connect(url: str, *, patience_s: float = PATIENCE_S, ending: Flag | None = None) -> redis.Redis:
    """Return a client whose calls retry while Redis does not answer, and raise RedisAway after `patience_s`.

    The retries are logged. After `ending` is set, because the process was asked to end, calls retry for
    ENDING_PATIENCE_S at most. A retry may repeat a command whose reply was lost, so every write in Slipstream is
    idempotent by id. The password comes from the URL, from SLIPSTREAM_REDIS_PASSWORD or from the file in
    SLIPSTREAM_REDIS_PASSWORD_FILE; the last two keep it out of process lists and logs. Raises RedisUnreachable for a
    malformed URL, and OSError if that file cannot be read.
    """
    patience = Patience(shown(url), limit_s=patience_s, ending=ending)
    try:
        client = redis.Redis.from_url(
            url,
            retry=patience,
            password=_password(url),
            protocol=2,
            decode_responses=False,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            socket_read_size=1 << 20,
            health_check_interval=30,
        )
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # it would be made at the first call; here it may raise
        return client
    except TypeError as error:  # redis-py passes the options of the URL on as arguments
        raise RedisUnreachable(f"`redis.url` {shown(url)} has a wrong option after `?`: {error}; remove it") from None
    except ValueError:  # its own message may contain a part of the password
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None


def _password(url: str) -> str | None:
    in_url, file = urlsplit(url).password, os.environ.get(PASSWORD_FILE_VARIABLE)
    if in_url is not None:
        return unquote(in_url)
    if PASSWORD_VARIABLE in os.environ or not file:
        return os.environ.get(PASSWORD_VARIABLE)
    try:
        return Path(file).read_text().strip()
    except UnicodeDecodeError as error:  # a ValueError, which `connect` would take for one of the URL
        raise OSError(f"{file} is no text: {error.reason}") from None


def connect_or_explain(url: str) -> redis.Redis:
    """Return a client of a server that answers now; see `connect`. Raises RedisUnreachable."""
    try:
        _wait_for_answer(url)
        return connect(url)
    except redis.AuthenticationError as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} refused the password: {error}; set {PASSWORD_VARIABLE} to the right one"
        ) from None
    except OSError as error:
        raise RedisUnreachable(
            f"{PASSWORD_FILE_VARIABLE} cannot be read: {error}; set it to a file that this user may read"
        ) from None
    except redis.RedisError as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} does not answer: {error.__cause__ or error}; start a server there, or leave "
            "redis.url empty: `slipstream up` then starts one"
        ) from None


def _wait_for_answer(url: str) -> None:
    try:
        with connect(url, patience_s=START_PATIENCE_S) as client:
            client.ping()
    except RedisAway as error:
        if not isinstance(error.__cause__, redis.BusyLoadingError):
            raise
        with connect(url) as client:  # the server runs, and is loading its file
            client.ping()


def without_password(url: str) -> str:
    """Return `url` without its password, and put the password into SLIPSTREAM_REDIS_PASSWORD for this process tree.

    The result is safe in files, logs and command lines. Raises RedisUnreachable for a malformed URL.
    """
    try:
        password = urlsplit(url).password
    except ValueError:
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None
    if password is None:
        if "password=" in urlsplit(url).query:
            raise RedisUnreachable(
                f"`redis.url` has its password in the query; write redis://:password@host or set {PASSWORD_VARIABLE}"
            )
        return url
    os.environ[PASSWORD_VARIABLE] = unquote(password)
    scheme, _, rest = url.partition("://")
    credentials, _, address = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}://{user}@{address}" if user else f"{scheme}://{address}"


def own_address(host: str, url: str) -> str:
    """`weights.host`; for `auto` the address by which this machine reaches Redis at `url`, which all hosts reach."""
    if host != "auto":
        return host
    parts = urlsplit(url)
    if parts.scheme in ("", "unix"):  # `slipstream up` starts a server on this machine
        return "127.0.0.1"
    return address_towards(parts.hostname or "")


def checked_address(host: str, url: str) -> str:
    """As `own_address`. Raises ConfigError unless it is an IPv4 address that weights can be served at."""
    try:
        host = own_address(host, url)
        if ipaddress.IPv4Address(host).is_unspecified:
            raise ConfigError(
                f"`weights.host` {host} is not an address that actors can connect to; give the address of one interface"
            )
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (ipaddress.AddressValueError, UnicodeError, OSError) as error:
        raise ConfigError(
            f"`weights.host` must be an IPv4 address of this machine that actors can reach; {host!r} cannot be bound: "
            f"{error}"
        ) from None
    return host


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`. Sends nothing. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_listening(url: str) -> bool:
    """Whether a process accepts connections at `url`, of a socket file, or of a port, which is 80 if it has none."""
    parts = urlsplit(url)
    try:
        if parts.scheme != "unix":
            socket.create_connection((parts.hostname, parts.port or 80), CALL_TIMEOUT_S).close()
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CALL_TIMEOUT_S)
            probe.connect(parts.path)
            return True
    except OSError:
        return False


def shown(url: str) -> str:
    """The URL without user and password, for messages and logs; it may be malformed."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", url)
