"""How a blob is pulled: from one source after another, until nothing is missing and all of it is right.

What has come stays. A source that dies, stalls or sends rubbish is left, and the next one is asked for the missing
chunks alone; so is whoever is there at the next call for the same blob, where one was given up.
"""

import logging
import time
from collections.abc import Callable

import redis
import zmq

from actors.fetch import Bytes, Corrupt, Full, Gone, Left, Partial, PullCounts, Silent, draw, empty_partial
from actors.sources import Nobody, Sources
from common.chunks import Blob
from common.curve import CurveKey
from common.weights import WeightsError

GIVE_UP_S = 10.0  # with nobody to hope for during so long, a new publisher may have made its offer
PUBLISHER_AGAIN_S = 0.5
RELAY_AGAIN_S: dict[type[Left], float] = {Gone: 2.0, Silent: 10.0, Corrupt: 60.0}
WAIT_S = 0.05

log = logging.getLogger(__name__)


class PullFailed(RuntimeError):
    """The blob is no longer served, did not come in time, or is not what its hashes say."""


class Puller:
    """Pulls one blob at a time. Its calls block."""

    def __init__(
        self, sources: Sources, *, blame: Callable[[str], None], chunk_bytes: int, key: CurveKey | None
    ) -> None:
        """`blame` is told the endpoint of whoever sent what it should not have; it may raise RedisError."""
        self.counts = PullCounts()
        self._sources = sources
        self._blame = blame
        self._chunk_bytes = chunk_bytes
        self._key = key
        self._context = zmq.Context()
        self._partial: Partial | None = None  # of a pull that was given up
        self._abandoned = False

    def pull(self, blob: Blob, *, publisher: str, check: Callable[[memoryview], None], timeout_s: float) -> Bytes:
        """Return the bytes of `blob`, which `check` has found right: it raises WeightsError where they are not.

        `publisher` is whom to ask where no relay helps. Raises PullFailed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            partial = self._partial
            if partial is None or partial.blob != blob:
                partial = self._partial = empty_partial(blob, self._chunk_bytes)
            self._fill(partial, publisher, deadline)
            self._partial = None
            try:
                check(partial.buffer.data)
                return partial.buffer
            except WeightsError as error:
                self._refuse(partial.givers)
                if partial.givers <= {publisher}:
                    raise PullFailed(str(error)) from error
                log.warning("pulled again from others than %s: %s", ", ".join(sorted(partial.givers)), error)
                for relay in partial.givers - {publisher}:
                    self._sources.shun(relay, RELAY_AGAIN_S[Corrupt])

    def abandon(self) -> None:
        """Have a pull under way in another thread fail, within draw.SILENCE_S, and all later ones."""
        self._abandoned = True

    def close(self) -> None:
        """Let go of the sockets. Idempotent."""
        self._context.destroy()

    def _fill(self, partial: Partial, publisher: str, deadline: float) -> None:
        begun = hoped_at = time.monotonic()
        while partial.missing:
            now = time.monotonic()
            if self._abandoned:
                raise PullFailed(f"{partial}, and no longer wanted")
            if now > deadline:
                raise PullFailed(f"{partial} at the deadline")
            if now - hoped_at > GIVE_UP_S:
                raise PullFailed(f"{partial}, and nobody to hope for in {GIVE_UP_S:.0f} s")
            source = self._sources.choose(partial.blob.root, publisher, begun=begun)
            if isinstance(source, Nobody):
                hoped_at = now if source is Nobody.YET else hoped_at
                time.sleep(WAIT_S)
            elif self._draw(partial, source, deadline, is_last=source == publisher):
                hoped_at = time.monotonic()

    def _draw(self, partial: Partial, source: str, deadline: float, *, is_last: bool) -> bool:
        """Whether there is hope in `source`. Raises PullFailed where the last resort has nothing to offer."""
        fetched_before = self.counts.fetched_bytes
        try:
            draw(partial, source, context=self._context, key=self._key, deadline=deadline, counts=self.counts)
        except Full:
            self._sources.turned_away(source)
            return True
        except Left as left:
            log.warning("%s: %s", partial, left)
            if isinstance(left, Corrupt):
                self._refuse({source})
            if is_last and not isinstance(left, Silent):
                raise PullFailed(str(left)) from left
            self._sources.shun(source, PUBLISHER_AGAIN_S if is_last else RELAY_AGAIN_S[type(left)])
        return self.counts.fetched_bytes > fetched_before

    def _refuse(self, givers: set[str]) -> None:
        """Count, here and for everyone, what was not what it should be."""
        self.counts.num_corrupt += 1
        for giver in givers:
            try:
                self._blame(giver)
            except redis.RedisError as error:
                log.warning("%s sent what it should not have, and Redis does not hear of it: %s", giver, error)
