"""Waiting for Redis: a call that fails is made again until the server is back, aloud, and up to a deadline."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

PATIENCE_S = 120.0  # a server that is restarted, stopped, or loads a large file is back within this
ENDING_PATIENCE_S = 5.0  # for a process that was told to end
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0  # what a client adds, at most, to the time that the server is away
SAY_AFTER_S = 1.0  # a connection that was merely cut is mended before
SAY_EVERY_S = 10.0
REFUSALS = (
    redis.ReadOnlyError, redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError, redis.exceptions.AskError
)  # fmt: skip
REFUSING_WORDS = ("MISCONF", "READONLY", "NOREPLICAS", "BUSY Redis")  # a script's error quotes what it met

T = TypeVar("T")
log = logging.getLogger(__name__)


class RedisAway(redis.ConnectionError):
    """Redis did not answer, or refused, for longer than this client waits."""


class NotReady(redis.ResponseError):
    """The server answers, and lacks what another process will bring."""


class Patience(Retry):
    """What the connections of one client do when a call fails: pause, and try again.

    redis-py nests its retries, a reconnection's in a command's; here the outermost alone waits. Threads may share it.
    """

    def __init__(self, where: str, *, limit_s: float, ending: threading.Event | None) -> None:
        """`where` names the server in what is said; `ending` shortens the limit to ENDING_PATIENCE_S once it is set."""
        super().__init__(ExponentialWithJitterBackoff(base=FIRST_PAUSE_S, cap=MAX_PAUSE_S), 0)
        self._where = where
        self._limit_s = limit_s
        self._ending = ending
        self._thread = threading.local()
        self._telling = threading.Lock()
        self._since: float | None = None  # of the trouble, where there is one
        self._refused = False  # the trouble is that the server answers, and does not what it was asked for
        self._said_at: float | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self  # each connection copies its retry; what is known of the server is shared

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """redis-py's way in: `fail` is told of every failed attempt, with its number where that is asked for."""

        def failed(error: Exception, num_failures: int) -> None:
            if is_retryable is not None and not is_retryable(error):
                raise error
            fail(error, num_failures) if with_failure_count else fail(error)

        return self.persist(do, failed)

    def persist(self, attempt: Callable[[], T], failed: Callable[[Exception, int], None] = lambda *_: None) -> T:
        """Return what `attempt` returns, in the end. Raises RedisAway, and at once what waiting would not mend."""
        if getattr(self._thread, "waits", False):
            return attempt()
        started, num_failures = time.monotonic(), 0
        while True:
            tried = time.monotonic()
            self._thread.waits = True
            try:
                result = attempt()
            except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
                if not passes(error):
                    raise
                num_failures += 1
                failed(error, num_failures)
                self._note(error, started=started, tried=tried)
                self._give_up_in_time(error, started)
            else:
                if self._since is not None and (num_failures or not self._refused):
                    self._note_end()
                return result
            finally:
                self._thread.waits = False
            time.sleep(self._backoff.compute(num_failures))

    def _note(self, error: Exception, *, started: float, tried: float) -> None:
        with self._telling:
            is_refusal = isinstance(error, redis.ResponseError)
            # A refusal that outlasted its call is not seen to end: what comes after it is another trouble.
            if self._since is None or is_refusal is not self._refused:
                self._since = tried
            self._refused = is_refusal
            now, since = time.monotonic(), min(started, self._since)
            if now - since < SAY_AFTER_S or (self._said_at and now - self._said_at < SAY_EVERY_S):
                return
            self._said_at = now
            log.warning(
                "Redis at %s %s since %s, %.0f s ago: %s", self._where, self._trouble(),
                time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since))), now - since, error,
            )  # fmt: skip

    def _note_end(self) -> None:
        with self._telling:
            if self._since is not None and self._said_at is not None:
                log.warning("Redis at %s is back after %.1f s", self._where, time.monotonic() - self._since)
            self._since = self._said_at = None

    def _give_up_in_time(self, error: Exception, started: float) -> None:
        """Raise RedisAway at the deadline: this call's or, where nobody is answered, that of the outage, so that what a
        process does at its end, once a call has waited in vain, does not wait as long again."""
        limit_s = min(self._limit_s, ENDING_PATIENCE_S) if self._ending and self._ending.is_set() else self._limit_s
        waited_s = time.monotonic() - (started if self._refused else min(started, self._since or started))
        if waited_s >= limit_s:
            raise RedisAway(f"Redis at {self._where} {self._trouble()} since {waited_s:.0f} s: {error}") from error

    def _trouble(self) -> str:
        return "refuses" if self._refused else "does not answer"


def passes(error: Exception) -> bool:
    """Whether waiting may mend `error`: nobody answers, the server loads its file, its disk or its master is away."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.exceptions.ClusterError):  # no node is done with what is being moved
        return True
    if isinstance(error, redis.exceptions.RedisClusterException):  # no node answers, or no node has a slot
        return "not covered" in str(error) or (isinstance(error.__cause__, Exception) and passes(error.__cause__))
    if isinstance(error, redis.ResponseError):
        return isinstance(error, (NotReady, *REFUSALS)) or any(words in str(error) for words in REFUSING_WORDS)
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)


def patiently(client: redis.Redis, attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns, in the end, as the client's own calls do: for more than one of them.

    Each attempt begins anew, and raises what it met. Raises RedisAway.
    """
    retry = client.retry if isinstance(client, redis.RedisCluster) else client.get_retry()
    assert isinstance(retry, Patience)
    return retry.persist(attempt)
