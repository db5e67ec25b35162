"""A notice: a value that the learner writes and all processes read. It is stored as the only member of a set.

Before version 7, Redis cannot grant the right to read a key without the right to write it, and a script has only the
rights of its caller. The verbs of actors write strings, hashes, lists and sorted sets, so an actor may write keys of
these types. No verb of an actor writes a set. So an actor can delete a notice, like any key, but cannot write one.
"""

from typing import Any

import redis

from slipstream.replay.records import scripts
from slipstream.replay.records.records import read_or_nothing


class Notices:
    """The notices on one server."""

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
