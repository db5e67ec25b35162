"""One way to talk to Redis: timeouts, retries and reply shapes are pinned here and nowhere else."""

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from common.patience import PATIENCE_S, Patience, RedisAway

PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD_FILE"  # where the password is a mounted secret
CALL_TIMEOUT_S = 5.0
START_PATIENCE_S = 3.0  # a server that is being started again; a wrong URL must be told of soon
NO_URL = (
    "must be redis://host:port, rediss://host:port, unix://path, redis+sentinel://host:port,host:port/service or "
    "redis+cluster://host:port, with / and @ in a password as %2F and %40"
)


class RedisUnreachable(ValueError):
    """No Redis answers at the URL; the message says what to check."""


def connect(url: str, *, patience_s: float = PATIENCE_S, ending: threading.Event | None = None) -> redis.Redis:
    """Return a client whose calls wait, aloud, while Redis is away; after `patience_s` they raise RedisAway.

    Where `ending` is set, the process was told to end, and they wait for ENDING_PATIENCE_S at most. A retry runs a
    command again when only its reply was lost, so every write in Slipstream is idempotent by id. The password comes
    from the URL or, kept out of process lists and logs, from SLIPSTREAM_REDIS_PASSWORD or the file that
    SLIPSTREAM_REDIS_PASSWORD_FILE names. Raises ValueError for what is no URL, and OSError without that file.
    """
    patience = Patience(shown(url), limit_s=patience_s, ending=ending)
    options: dict[str, Any] = {
        "password": _password(url),
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "socket_read_size": 1 << 20,
        "health_check_interval": 30,
    }
    match urlsplit(url).scheme:
        case "redis+sentinel":
            return _sentinel_client(url, options, patience)
        case "redis+cluster":
            return _cluster_client(url, options, patience)
        case _:
            return redis.Redis.from_url(url, retry=patience, **options)


def _user(parts: SplitResult) -> str | None:
    return None if parts.username is None else unquote(parts.username)


def _password(url: str) -> str | None:
    in_url, file = urlsplit(url).password, os.environ.get(PASSWORD_FILE_VARIABLE)
    if in_url is not None:
        return unquote(in_url)
    if PASSWORD_VARIABLE in os.environ or not file:
        return os.environ.get(PASSWORD_VARIABLE)
    return Path(file).read_text().strip()


def _sentinel_client(url: str, options: dict[str, Any], patience: Patience) -> redis.Redis:
    """Every new connection asks the sentinels where the master is; they themselves want no password."""
    parts = urlsplit(url)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("no service")
    asking = {"socket_timeout": CALL_TIMEOUT_S, "socket_connect_timeout": CALL_TIMEOUT_S, "protocol": 2,
              "retry": Retry(NoBackoff(), 0)}  # fmt: skip
    sentinel = Sentinel(_addresses(parts), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]
        service, username=_user(parts), db=int(database or 0), retry=patience, **options, **_query_options(parts)
    )
    return client


class _PatientCluster(redis.RedisCluster):
    """redis-py's cluster client makes up its own retries; here its calls wait as those of the other clients do."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        patience = cast(Patience, self.retry)
        return patience.persist(lambda: super(_PatientCluster, self).execute_command(*args, **options))  # type: ignore[no-untyped-call]


def _cluster_client(url: str, options: dict[str, Any], patience: Patience) -> redis.Redis:
    """Asks any node for the others, at once. Its verbs are those of a single server's client."""
    parts = urlsplit(url)
    nodes = [ClusterNode(host, port) for host, port in _addresses(parts)]  # type: ignore[no-untyped-call]
    settings = {**options, **_query_options(parts), "username": _user(parts)}
    client = patience.persist(lambda: _PatientCluster(startup_nodes=nodes, retry=patience, **settings))
    return cast(redis.Redis, client)


def node_of(client: redis.Redis, key: str) -> redis.Redis:
    """The client of the one server that holds `key`, as far as is known: of a cluster, one of its nodes."""
    if not isinstance(client, redis.RedisCluster):
        return client
    return cast(redis.Redis, client.get_redis_connection(client.get_node_from_key(key)))


def follow(client: redis.Redis, moved: redis.exceptions.MovedError) -> None:
    """Let `node_of` know where a slot is now, as the client's own calls do for themselves."""
    if isinstance(client, redis.RedisCluster):
        client.nodes_manager.move_slot(moved)


def _addresses(parts: SplitResult) -> list[tuple[str, int]]:
    """The `host:port` pairs of a URL that names more than one. Raises ValueError."""
    pairs = [address.rpartition(":") for address in parts.netloc.rpartition("@")[2].split(",")]
    if not all(host for host, _, _ in pairs):
        raise ValueError("no host")
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def _query_options(parts: SplitResult) -> dict[str, Any]:
    """The options that redis-py reads from a URL's query, as for any other URL."""
    return dict(parse_url(f"redis://?{parts.query}"))  # type: ignore[no-untyped-call]


def connect_shards(
    url: str, shards: Sequence[str], *, patience_s: float = PATIENCE_S, ending: threading.Event | None = None
) -> list[redis.Redis]:
    """Return a client for `url` and one for each of `redis.shards`, with the user and the password of `url`.

    A server that is named twice has one client.
    """
    urls = _shard_urls(url, shards)
    clients = {each: connect(each, patience_s=patience_s, ending=ending) for each in dict.fromkeys(urls)}
    return [clients[each] for each in urls]


def _shard_urls(url: str, shards: Sequence[str]) -> list[str]:
    credentials, at, _ = urlsplit(url).netloc.rpartition("@")
    return [url, *(shard.replace("://", f"://{credentials}{at}", 1) if shard else url for shard in shards)]


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
    except OSError as error:
        raise RedisUnreachable(f"{PASSWORD_FILE_VARIABLE}: {error}; name a file that this user may read") from None
    except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
        raise RedisUnreachable(
            f"`redis.url` {shown(url)} does not answer: {error.__cause__ or error}; start a server there, or leave it "
            "empty in `slipstream up` to have one started"
        ) from None
    except ValueError:  # its own words may hold a part of the password
        raise RedisUnreachable(f"`redis.url` {NO_URL}, got {shown(url)!r}") from None


def check_servers(url: str, shards: Sequence[str]) -> None:
    """Raise RedisUnreachable unless the servers of `redis.url` and `redis.shards` all answer now."""
    connect_or_explain(url).close()  # before its parts are looked at, as it may be no URL
    for shard in dict.fromkeys(_shard_urls(url, shards)[1:]):
        connect_or_explain(shard).close()


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
