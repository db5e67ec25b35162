"""Pulls a blob from one source after another, until it is complete and verified.

Received chunks are kept. If a source dies, stalls or sends malformed data, the next source is asked only for the
missing chunks. A pull that failed keeps its chunks too, for the next call with the same blob.
"""

import logging
import socket
import time
from collections.abc import Callable

import redis
import zmq

from slipstream.actors.weights.fetch import Bytes, Corrupt, Full, Gone, Left, Partial, PullCounts, Silent, fetch
from slipstream.actors.weights.sources import NoSource, Sources
from slipstream.common.process.connection import connect
from slipstream.common.transfer.chunks import CHUNK_BYTES, Blob
from slipstream.common.transfer.encryption import CurveKey, key_from_environment
from slipstream.common.transfer.weights import WeightsError
from slipstream.replay.fleet.bulletin import Bulletin

GIVE_UP_S = 10.0  # without progress for this long a pull fails: a new publisher may have made another offer
PUBLISHER_AGAIN_S = 0.5
RELAY_AGAIN_S: dict[type[Left], float] = {Gone: 2.0, Silent: 10.0, Corrupt: 60.0}
WAIT_S = 0.05
SMALL_CHUNK_BYTES = 1 << 18  # of a slow link, on which a whole chunk takes longer than fetch.SILENCE_S
CHUNK_S = 1.0  # once the rate is known, a chunk takes about so long, or less

RELAYS_PATIENCE_S = 0.0  # if Redis is away, the last known relays and the publisher are asked at once
RELAY_PATIENCE_S = 5.0  # a relay without progress for this long is not waited for

log = logging.getLogger(__name__)


class PullFailed(RuntimeError):
    """No source serves the blob any more, it did not arrive in time, or it does not match its hash."""


class Puller:
    """Pulls one blob at a time. Its calls block."""

    def __init__(
        self, sources: Sources, *, blame: Callable[[str], None], chunk_bytes: int = CHUNK_BYTES, key: CurveKey | None
    ) -> None:
        """`blame` is called with the endpoint of each source of corrupt bytes; it may raise RedisError."""
        self.counts = PullCounts()
        self._sources = sources
        self._blame = blame
        self._max_chunk_bytes = self._chunk_bytes = chunk_bytes
        self._key = key
        self._context = zmq.Context()
        self._partial: Partial | None = None  # of a pull that failed
        self._abandoned = False

    def pull(self, blob: Blob, *, publisher: str, check: Callable[[memoryview], None], timeout_s: float) -> Bytes:
        """Return the bytes of `blob`, verified by `check`, which raises WeightsError. Raises PullFailed.

        `publisher` is the endpoint to ask if no relay has the blob.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            partial = self._partial
            if partial is None or partial.blob != blob:
                partial = self._partial = Partial(blob=blob, chunk_bytes=self._chunk_bytes)
            self._fill(partial, publisher, deadline)
            self._partial = None
            try:
                check(partial.buffer.data)
                return partial.buffer
            except WeightsError as error:
                self._refuse(partial.givers)
                if partial.givers <= {publisher}:
                    raise PullFailed(f"{publisher}: {error}") from error
                log.warning(
                    "the blob is corrupt; pulling it again without %s: %s", ", ".join(sorted(partial.givers)), error
                )
                for relay in partial.givers - {publisher}:
                    self._sources.avoid(relay, RELAY_AGAIN_S[Corrupt])

    def abandon(self) -> None:
        """Make a pull in another thread fail within fetch.SILENCE_S, and every later one at once."""
        self._abandoned = True

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._context.destroy()

    def _fill(self, partial: Partial, publisher: str, deadline: float) -> None:
        begun = progress_at = time.monotonic()
        while partial.missing:
            now = time.monotonic()
            if self._abandoned:
                raise PullFailed(f"{partial}: the pull was cancelled")
            if now > deadline:
                raise PullFailed(f"{partial} at the deadline")
            if now - progress_at > GIVE_UP_S:
                raise PullFailed(f"{partial}: no source made progress in {GIVE_UP_S:.0f} s")
            source = self._sources.choose(partial.blob.root, publisher, begun=begun)
            if isinstance(source, NoSource):
                progress_at = now if source is NoSource.RELAY_IS_FETCHING else progress_at
                time.sleep(WAIT_S)
            elif self._fetch_from(partial, source, deadline, is_last=source == publisher):
                progress_at = time.monotonic()

    def _fetch_from(self, partial: Partial, source: str, deadline: float, *, is_last: bool) -> bool:
        """Fetch from one source; return whether it made progress, or is only full. Raises PullFailed."""
        started, fetched_before = time.monotonic(), self.counts.fetched_bytes
        try:
            fetch(partial, source, context=self._context, key=self._key, deadline=deadline, counts=self.counts)
        except Full:
            self._sources.note_full(source)
            return True
        except Left as left:
            log.warning("%s: %s", partial, left)
            if isinstance(left, Corrupt):
                self._refuse({source})
            if is_last and not isinstance(left, Silent):
                raise PullFailed(str(left)) from left
            self._sources.avoid(source, PUBLISHER_AGAIN_S if is_last else RELAY_AGAIN_S[type(left)])
            if isinstance(left, Silent) and partial.chunk_bytes > SMALL_CHUNK_BYTES:
                self._chunk_bytes = SMALL_CHUNK_BYTES
                partial.split(SMALL_CHUNK_BYTES)
                return True  # the next attempt may well succeed
        num_fetched, seconds = self.counts.fetched_bytes - fetched_before, time.monotonic() - started
        if num_fetched >= partial.chunk_bytes:
            fits = max(SMALL_CHUNK_BYTES, int(CHUNK_S * num_fetched / seconds))
            self._chunk_bytes = min(self._max_chunk_bytes, fits)
        return num_fetched > 0

    def _refuse(self, givers: set[str]) -> None:
        """Count corrupt bytes in this process, and report their sources to Redis."""
        self.counts.num_corrupt += 1
        for giver in givers:
            try:
                self._blame(giver)
            except redis.RedisError as error:
                log.warning("could not report the corrupt data of %s to Redis: %s", giver, error)


def actors_puller(redis_url: str, run_id: str, *, actor: str, chunk_bytes: int = CHUNK_BYTES) -> Puller:
    """The puller of an actor, which asks the relays of its run, the one on its own host first, then the publisher."""
    bulletin = Bulletin(connect(redis_url, patience_s=RELAYS_PATIENCE_S), run_id)
    sources = Sources(bulletin.relays, name=actor, host=socket.gethostname(), patience_s=RELAY_PATIENCE_S)
    return Puller(sources, blame=bulletin.blame, chunk_bytes=chunk_bytes, key=key_from_environment())
