"""One way to talk to Redis: timeouts, retries and reply shapes are pinned here and nowhere else."""

import os
import re
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
CALL_TIMEOUT_S = 5.0
NUM_RETRIES = 3
NO_URL = "must be redis://host:port or unix://path, with / and @ in a password as %2F and %40"


class RedisUnreachable(ValueError):
    """No Redis answers at the URL; the message says what to check."""


def connect(url: str) -> redis.Redis:
    """Return a client whose every call ends within about 20 s, retries included.

    A retry runs a command again when only its reply was lost, so every write in Slipstream is idempotent by id. The
    password comes from the URL or, kept out of process lists and logs, from SLIPSTREAM_REDIS_PASSWORD.
    """
    client = redis.Redis.from_url(
        url,
        password=urlsplit(url).password or os.environ.get(PASSWORD_VARIABLE),
        protocol=2,
        decode_responses=False,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CALL_TIMEOUT_S,
        socket_read_size=1 << 20,
        health_check_interval=30,
        retry=Retry(ExponentialWithJitterBackoff(base=0.1, cap=1.0), NUM_RETRIES),
    )
    return client


def connect_or_explain(url: str) -> redis.Redis:
    """Return a client that has answered a ping. Raises RedisUnreachable."""
    try:
        client = connect(url)
        client.ping()
    except redis.AuthenticationError as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} refused the password: {error}; set {PASSWORD_VARIABLE}"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} does not answer: {error}; start a server there, or leave it empty in "
            "`slipstream up` to have one started"
        ) from None
    except ValueError:  # its own words may hold a part of the password
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None
    return client


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
