"""Where an actor or a relay pulls from: the relay of its own host, another, or the publisher."""

import enum
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from replay.bulletin import RelayNotice

FULL_S = 0.3  # on average; a place is free when one receiver has all it wants
ASK_REDIS_AGAIN_S = 1.0  # after a failure; until then what was known last counts


class Nobody(enum.Enum):
    """There is no source now."""

    YET = "yet"
    """A relay gets nearer."""
    AT_ALL = "at all"
    """Each has just failed, or is full."""


@dataclass(kw_only=True, slots=True)
class _Progress:
    """How far a relay had come, and when that was last seen to change."""

    moved_bytes: int
    seen_at: float


class Sources:
    """What is known of the relays, and which of the sources has just failed its caller."""

    def __init__(self, find: Callable[[], list[RelayNotice]], *, name: str, host: str, patience_s: float) -> None:
        """`find` asks Redis. A relay that does not have what is wanted yet is waited for while it gets nearer, for
        `patience_s` at a time, and one on `host` rather than asking another. `name` is the caller's, a relay perhaps.
        """
        self._find = find
        self._name = name
        self._host = host
        self._patience_s = patience_s
        self._relays: list[RelayNotice] = []
        self._find_at = 0.0
        self._progress: dict[str, _Progress] = {}
        self._shunned_until: dict[str, float] = {}
        self._full_until: dict[str, float] = {}

    def shun(self, endpoint: str, seconds: float) -> None:
        """Expect nothing of this source for so long."""
        self._shunned_until[endpoint] = time.monotonic() + seconds

    def turned_away(self, endpoint: str) -> None:
        """This source has no room now: it is worth waiting for, and will be asked again in a moment."""
        self._full_until[endpoint] = time.monotonic() + FULL_S * random.uniform(0.5, 1.5)

    def choose(self, root: str, publisher: str, *, begun: float) -> str | Nobody:
        """The endpoint to pull the blob `root` from now; where there is nobody, ask again in a moment.

        Relays come first, as the publisher is everyone's. `begun` is when the caller began to want this blob: from then
        on, a relay has its time.
        """
        now = time.monotonic()
        relays = [relay for relay in self._look(now) if self._shunned_until.get(relay.endpoint, 0.0) <= now]
        for near in ([relay for relay in relays if relay.host == self._host], relays):
            holders = [relay for relay in near if root in relay.roots and self._may_ask(relay.endpoint, now)]
            if holders:
                return min(holders, key=lambda relay: (relay.num_children, random.random())).endpoint
            if any(now - max(self._progress[relay.name].seen_at, begun) < self._patience_s for relay in near):
                return Nobody.YET
        return publisher if self._may_ask(publisher, now) else Nobody.AT_ALL

    def _may_ask(self, endpoint: str, now: float) -> bool:
        return max(self._shunned_until.get(endpoint, 0.0), self._full_until.get(endpoint, 0.0)) <= now

    def _look(self, now: float) -> list[RelayNotice]:
        """The relays but the caller itself, with their progress noted."""
        if now >= self._find_at:
            try:
                self._relays = [relay for relay in self._find() if relay.name != self._name]
            except redis.RedisError:  # its client has said so
                self._find_at = now + ASK_REDIS_AGAIN_S
        moved = {relay.name: relay.fetched_bytes + relay.served_bytes for relay in self._relays}
        known = {name: self._progress.get(name) for name in moved}
        self._progress = {
            name: old if (old := known[name]) and old.moved_bytes == num_bytes
            else _Progress(moved_bytes=num_bytes, seen_at=now)
            for name, num_bytes in moved.items()
        }  # fmt: skip
        return self._relays
