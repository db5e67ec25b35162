"""Retries calls to Redis until the server answers again or a deadline has passed, and logs the outage."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from slipstream.common.process.shutdown import Flag

PATIENCE_S = 120.0  # enough for a server that restarts, is suspended for a while, or loads a large file
ENDING_PATIENCE_S = 5.0  # for a process that was asked to end
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0  # the most that a client adds to the duration of an outage
LOG_AFTER_S = 1.0  # a reconnect after a lost connection takes less
LOG_EVERY_S = 10.0
REFUSING_WORDS = ("MISCONF", "READONLY", "NOREPLICAS", "BUSY Redis")  # a script's error contains these words too

T = TypeVar("T")
log = logging.getLogger(__name__)


class RedisAway(redis.ConnectionError):
    """Redis has not answered, or has refused the call, for longer than this client retries."""


class NotReady(redis.ResponseError):
    """The server answers, but lacks something that another process will provide: retry."""


class Patience(Retry):
    """The retry policy of one client: after a failed call, pause and try again. Threads may share it.

    redis-py nests its retries: a command's retry contains the retry of its reconnection. Here only the outermost one
    waits.
    """

    def __init__(self, where: str, *, limit_s: float, ending: Flag | None) -> None:
        """`where` names the server in messages; after `ending` is set, the limit is ENDING_PATIENCE_S at most."""
        super().__init__(ExponentialWithJitterBackoff(base=FIRST_PAUSE_S, cap=MAX_PAUSE_S), 0)
        self._where = where
        self._limit_s = limit_s
        self._ending = ending
        self._thread = threading.local()
        self._noting = threading.Lock()
        self._since: float | None = None  # start of the outage; None while the server answers
        self._refused = False  # the server answers, but refuses the call
        self._logged_at: float | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self  # each connection copies its retry policy; all of them share what is known of the server

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """The method that redis-py calls: `fail` is called after every failed attempt, on request with its number."""

        def failed(error: Exception, num_failures: int) -> None:
            if is_retryable is not None and not is_retryable(error):
                raise error
            fail(error, num_failures) if with_failure_count else fail(error)

        return self.persist(do, failed)

    def persist(self, attempt: Callable[[], T], failed: Callable[[Exception, int], None] = lambda *_: None) -> T:
        """Repeat `attempt` until it succeeds; return its result. Raises RedisAway, and other errors at once."""
        if getattr(self._thread, "waits", False):
            return attempt()
        started, num_failures = time.monotonic(), 0
        while True:
            tried = time.monotonic()
            self._thread.waits = True
            try:
                result = attempt()
            except (redis.RedisError, OSError) as error:
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
        with self._noting:
            is_refusal = isinstance(error, redis.ResponseError)
            # If a refusal changes to silence, or back, that is a new outage: no call has seen the old one end.
            if self._since is None or is_refusal is not self._refused:
                self._since = tried
            self._refused = is_refusal
            now, since = time.monotonic(), min(started, self._since)
            if now - since < LOG_AFTER_S or (self._logged_at and now - self._logged_at < LOG_EVERY_S):
                return
            self._logged_at = now
            log.warning(
                "Redis at %s %s since %s (%.0f s): %s",
                self._where,
                self._trouble(),
                time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since))),
                now - since,
                error,
            )

    def _note_end(self) -> None:
        with self._noting:
            if self._since is not None and self._logged_at is not None:
                log.warning("Redis at %s is back after %.1f s", self._where, time.monotonic() - self._since)
            self._since = self._logged_at = None

    def _give_up_in_time(self, error: Exception, started: float) -> None:
        """Raise RedisAway at the deadline.

        If the server does not answer at all, the time counts from the start of the outage: after one call has waited in
        vain, the last calls of a process do not wait as long again.
        """
        limit_s = min(self._limit_s, ENDING_PATIENCE_S) if self._ending and self._ending.is_set() else self._limit_s
        waited_s = time.monotonic() - (started if self._refused else min(started, self._since or started))
        if waited_s >= limit_s:
            raise RedisAway(f"Redis at {self._where} {self._trouble()} for {waited_s:.0f} s: {error}") from error

    def _trouble(self) -> str:
        return "has refused calls" if self._refused else "has not answered"


def passes(error: Exception) -> bool:
    """Whether a retry can help: the server does not answer, is loading its file, or has lost its disk or its master."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ResponseError):
        return isinstance(error, NotReady | redis.ReadOnlyError) or any(words in str(error) for words in REFUSING_WORDS)
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)


def patiently(client: redis.Redis, attempt: Callable[[], T]) -> T:
    """Repeat `attempt`, which may make several calls, as the client repeats a single one; return its result.

    Every attempt starts from the beginning. Raises RedisAway, and other errors at once.
    """
    retry = client.get_retry()
    assert isinstance(retry, Patience)
    return retry.persist(attempt)
