"""The rendezvous of a broadcast group: its members exchange their addresses through a hash in Redis.

torch calls this a store. torch's own TCPStore is a server that listens on every interface and has no password; here the
passwords and roles of Redis decide who takes part. gloo does not check the values, and an empty one ends the process.
So each value has a MAC, made with the run's key. Without a key the MAC only detects damage.
"""

import contextlib
import hashlib
import hmac
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import redis

POLL_S = 0.01
TTL_S = 120
MAC_BYTES = 32


class RendezvousFailed(RuntimeError):
    """A value did not arrive in time, has a wrong MAC, or Redis did not answer."""


class Rendezvous:
    """The methods of a torch store: a subclass of this class and of torch's `Store` is a store."""

    def __init__(self, client: redis.Redis, name: str, *, secret: bytes, timeout_s: float) -> None:
        """`name` is the group's key in Redis. `get` waits for `timeout_s` at most."""
        super().__init__()  # torch's, in a subclass that is a store
        self._client = client
        self._name = name
        self._secret = secret
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        with _answered(), self._client.pipeline(transaction=True) as transaction:
            transaction.hset(self._name, key, self._mac(key, value) + value)
            transaction.expire(self._name, TTL_S)
            transaction.execute()

    def get(self, key: str) -> bytes:
        """Wait for the value and return it."""
        self.wait([key])
        with _answered():
            found: Any = self._client.hget(self._name, key)
        stored = found or b""
        mac, value = stored[:MAC_BYTES], stored[MAC_BYTES:]
        if not value or not hmac.compare_digest(mac, self._mac(key, value)):
            raise RendezvousFailed(
                f"{self._name}: the {len(stored)} bytes of {key} have a wrong MAC: another process wrote them, or a "
                "member has another `weights.key_file`"
            )
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        patience_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + patience_s
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RendezvousFailed(f"{self._name}: no value for {', '.join(keys)} in {patience_s:.1f} s")
            time.sleep(POLL_S)

    def check(self, keys: Sequence[str]) -> bool:
        with _answered():
            return all(self._client.hexists(self._name, key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        with _answered():
            return self._client.hincrby(self._name, f"count:{key}", amount)

    def delete_key(self, key: str) -> bool:
        with _answered():
            return bool(self._client.hdel(self._name, key))

    def _mac(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{self._name} {key} ".encode() + value, hashlib.sha256)


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Turn every Redis error into a RendezvousFailed: torch handles only RuntimeErrors."""
    try:
        yield
    except redis.RedisError as error:
        raise RendezvousFailed(f"Redis: {error}") from error
