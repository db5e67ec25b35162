"""A notice: a value that the learner puts up and everyone reads. It is kept as the only member of a set.

Before version 7, Redis knows no right to read a key without one to write it, and what a script does its caller must be
allowed to do. An actor's verbs write strings, hashes, lists and sorted sets, so an actor could write any of these. No
verb of an actor writes a set: it may take a notice down, as any key, and cannot put another up.
"""

from typing import Any

import redis

from replay import scripts


class Notices:
    """Those of one server."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = scripts.load(client, "put")

    def put(self, name: str, value: str | bytes, *, ttl_s: int | None = None) -> None:
        """Put `value` up under the key `name`, for good or for `ttl_s`."""
        self._put(keys=[name], args=[value] if ttl_s is None else [value, ttl_s])

    def read(self, name: str) -> bytes | None:
        """What is up under the key `name`; None where nothing is."""
        value: Any = self._client.srandmember(name)
        return None if value is None else bytes(value)
