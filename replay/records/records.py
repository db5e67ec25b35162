"""Reads records that other processes wrote: a malformed one is skipped and counted, and its sender is logged.

Each process logs each malformed record once. A key of another type reads as missing.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import redis

from slipstream.common.process.wire import WireError, decode
from slipstream.replay.records import scripts
from slipstream.replay.records.scripts import is_damage

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


def read_records(kind: type[S], frames: Iterable[tuple[str, Any]]) -> list[tuple[str, S]]:
    """(sender, record) of each well-formed frame. A None frame stands for a missing key, and is not logged."""
    return [
        (sender, record)
        for sender, frame in frames
        if frame is not None and (record := _read(kind, sender, frame)) is not None
    ]


def read_or_nothing(read: Callable[[], T], name: str) -> T | None:
    """Return what `read` returns; None, and a log line, if the key `name` has another type."""
    try:
        return read()
    except redis.ResponseError as error:
        if not is_damage(error):
            raise
        log_skipped(name, str(error))
        return None


def write_over(client: redis.Redis, write: Callable[[], T], *, name: str, kind: str) -> T:
    """Return what `write` returns. Its key `name` is deleted first if that is of another type than `kind`."""
    try:
        return write()
    except redis.ResponseError as error:
        if not is_damage(error):
            raise
        found: Any = client.type(name)
        if found.decode() not in (kind, "none"):
            log.warning("%s is of type %s instead of %s: deleted: %s", name, found.decode(), kind, error)
            client.delete(name)
    return write()


def leave_set(client: redis.Redis, name: str, member: str) -> None:
    """Remove `member` from the sorted set `name`."""
    write_over(client, lambda: client.zrem(name, member), name=name, kind="zset")


@functools.lru_cache(maxsize=1024)
def log_skipped(sender: str, why: str) -> None:
    """Log, once in this process, that the record of `sender` is skipped."""
    log.warning("%s is skipped: %s", sender, why)


class Notices:
    """The notices on one server: values that the learner writes and all processes read, each the member of a set.

    Before version 7, Redis cannot grant the right to read a key without the right to write it, and a script has only
    the rights of its caller. The verbs of actors write strings, hashes, lists and sorted sets, so an actor may write
    keys of these types. No verb of an actor writes a set. So an actor can delete a notice, like any key, but cannot
    write one.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = scripts.load(client, "put")

    def put(self, name: str, value: str | bytes, *, ttl_s: int | None = None) -> None:
        """Write `value` under the key `name`; it expires after `ttl_s` if that is given."""
        self._put(keys=[name], args=[value] if ttl_s is None else [value, ttl_s])

    def read(self, name: str) -> bytes | None:
        """The value under the key `name`; None if the key is missing or is not a set."""
        value: Any = read_or_nothing(lambda: self._client.srandmember(name), name)
        return None if value is None else bytes(value)


def _read(kind: type[S], sender: str, frame: Any) -> S | None:
    try:
        if not isinstance(frame, bytes):
            raise WireError(f"not a {kind.__name__}: {frame}")
        return decode(kind, frame)
    except WireError as error:
        log_skipped(sender, str(error))
        return None
