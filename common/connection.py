"""One way to talk to Redis: timeouts, retries and reply shapes are pinned here and nowhere else."""

import os
import re
import threading
from urllib.parse import unquote, urlsplit

import redis

from common.patience import PATIENCE_S, Patience, RedisAway

PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
CALL_TIMEOUT_S = 5.0
START_PATIENCE_S = 3.0  # a server that is being started again; a wrong URL must be told of soon
NO_URL = "must be redis://host:port or unix://path, with / and @ in a password as %2F and %40"


class RedisUnreachable(ValueError):
    """No Redis answers at the URL; the message says what to check."""


def connect(url: str, *, patience_s: float = PATIENCE_S, ending: threading.Event | None = None) -> redis.Redis:
    """Return a client whose calls wait, aloud, while Redis is away; after `patience_s` they raise RedisAway.

    Where `ending` is set, the process was told to end, and they wait for ENDING_PATIENCE_S at most. A retry runs a
    command again when only its reply was lost, so every write in Slipstream is idempotent by id. The password comes
    from the URL or, kept out of process lists and logs, from SLIPSTREAM_REDIS_PASSWORD.
    """
    return redis.Redis.from_url(
        url,
        password=urlsplit(url).password or os.environ.get(PASSWORD_VARIABLE),
        protocol=2,
        decode_responses=False,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CALL_TIMEOUT_S,
        socket_read_size=1 << 20,
        health_check_interval=30,
        retry=Patience(shown(url), limit_s=patience_s, ending=ending),
    )


def connect_or_explain(
    url: str, *, patience_s: float = PATIENCE_S, ending: threading.Event | None = None
) -> redis.Redis:
    """Return a client, as `connect` does, of a server that answers now. Raises RedisUnreachable."""
    try:
        _wait_for_answer(url, ending)
        return connect(url, patience_s=patience_s, ending=ending)
    except redis.AuthenticationError as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} refused the password: {error}; set {PASSWORD_VARIABLE}"
        ) from None
    except redis.RedisError as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} does not answer: {error.__cause__ or error}; start a server there, or leave it "
            "empty in `slipstream up` to have one started"
        ) from None
    except ValueError:  # its own words may hold a part of the password
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None


def _wait_for_answer(url: str, ending: threading.Event | None) -> None:
    try:
        with connect(url, patience_s=START_PATIENCE_S, ending=ending) as client:
            client.ping()
    except RedisAway as error:
        if not isinstance(error.__cause__, redis.BusyLoadingError):
            raise
        with connect(url, ending=ending) as client:  # it is there, and reads its file
            client.ping()


def without_password(url: str) -> str:
    """Return `url` without its password, which goes to SLIPSTREAM_REDIS_PASSWORD, for this process and its children.

    What is left may stand in files, logs and command lines. Raises RedisUnreachable for what is no URL.
    """
    try:
        password = urlsplit(url).password
    except ValueError:
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None
    if password is None:
        if "password=" in urlsplit(url).query:
            raise RedisUnreachable(
                f"`redis.url`: write the password as redis://:password@host or set {PASSWORD_VARIABLE}"
            )
        return url
    os.environ[PASSWORD_VARIABLE] = unquote(password)
    scheme, _, rest = url.partition("://")
    credentials, _, address = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}://{user}@{address}" if user else f"{scheme}://{address}"


def shown(url: str) -> str:
    """The URL without user and password, for messages and logs, also where it is none."""
    return re.sub(r"://.*@", "://***@", url)
