"""Chooses the source of a pull: the relay of the receiver's own host, another relay, or the publisher."""

import enum
import random
import time
from collections.abc import Callable

import redis

from slipstream.replay.fleet.bulletin import RelayNotice

FULL_S = 0.3  # average pause before a full source is asked again; a place is free when one of its receivers is done
ASK_REDIS_AGAIN_S = 1.0  # after a failure; until then the last known relays are used
FEW = 10  # relays; of more than that, all their notices are not read again each time that a waiting receiver chooses
NOTICES_PER_S = 200.0  # then: a thousand actors may wait for a version at a time


class NoSource(enum.Enum):
    """The reason that there is no source now."""

    RELAY_IS_FETCHING = "a relay is fetching"
    """A relay makes progress and may have the blob soon."""
    ALL_UNAVAILABLE = "all unavailable"
    """Every source has just failed, or is full."""


class Sources:
    """The known relays, and the sources that have just failed."""

    def __init__(self, find: Callable[[], list[RelayNotice]], *, name: str, host: str, patience_s: float) -> None:
        """`find` reads the relays from Redis. `name` is the caller's name, as the caller may be a relay itself.

        The caller waits for a relay that does not have the blob yet as long as the relay makes progress at least every
        `patience_s`. It waits for a relay on its own `host` before it asks other relays.
        """
        self._find = find
        self._name = name
        self._host = host
        self._patience_s = patience_s
        self._relays: list[RelayNotice] = []
        self._find_at = 0.0
        self._progress: dict[str, tuple[int, float]] = {}  # bytes that a relay has moved, and when they last changed
        self._avoided_until: dict[str, float] = {}
        self._full_until: dict[str, float] = {}

    def avoid(self, endpoint: str, seconds: float) -> None:
        """Do not choose this source for so many seconds."""
        self._avoided_until[endpoint] = time.monotonic() + seconds

    def note_full(self, endpoint: str) -> None:
        """Do not choose this source for a moment: it has no free place now."""
        self._full_until[endpoint] = time.monotonic() + FULL_S * random.SystemRandom().uniform(0.5, 1.5)

    def choose(self, root: str, publisher: str, *, begun: float) -> str | NoSource:
        """The endpoint from which to pull the blob `root` now. If no source is free, call again after a moment.

        Relays come first, because the publisher serves all hosts. `begun` is when the caller began to pull this blob; a
        relay's time to make progress counts from then on.
        """
        now = time.monotonic()
        relays = [relay for relay in self._look(now) if self._avoided_until.get(relay.endpoint, 0.0) <= now]
        for near in ([relay for relay in relays if relay.host == self._host], relays):
            holders = [relay for relay in near if root in relay.roots and self._may_ask(relay.endpoint, now)]
            if holders:
                return min(holders, key=lambda relay: (relay.num_children, random.SystemRandom().random())).endpoint
            if any(now - max(self._progress[relay.name][1], begun) < self._patience_s for relay in near):
                return NoSource.RELAY_IS_FETCHING
        return publisher if self._may_ask(publisher, now) else NoSource.ALL_UNAVAILABLE

    def _may_ask(self, endpoint: str, now: float) -> bool:
        return max(self._avoided_until.get(endpoint, 0.0), self._full_until.get(endpoint, 0.0)) <= now

    def _look(self, now: float) -> list[RelayNotice]:
        """The relays except the caller itself; this also updates their progress."""
        if now >= self._find_at:
            try:
                self._relays = [relay for relay in self._find() if relay.name != self._name]
                self._find_at = now + (len(self._relays) / NOTICES_PER_S if len(self._relays) > FEW else 0.0)
            except redis.RedisError:  # its client has logged it
                self._find_at = now + ASK_REDIS_AGAIN_S
        before, self._progress = self._progress, {}
        for relay in self._relays:
            moved_bytes = relay.fetched_bytes + relay.served_bytes
            old_bytes, changed_at = before.get(relay.name, (-1, now))
            self._progress[relay.name] = moved_bytes, changed_at if moved_bytes == old_bytes else now
        return self._relays
