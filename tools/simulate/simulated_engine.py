"""An inference engine in simulated time: every iteration gives each running request one token."""

import heapq
import itertools
from dataclasses import dataclass
from functools import partial

import simpy


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTime:
    """The time of one iteration with n running requests: fixed_s + per_request_s * n.

    With 9 ms and 0.2 ms, one request gets a token every 9.2 ms, and each of 32 requests one every 15.4 ms.
    """

    fixed_s: float
    per_request_s: float

    def of(self, num_requests: int) -> float:
        return self.fixed_s + self.per_request_s * num_requests


class SimulatedEngine:
    """Requests share its iterations; the next end is computed again whenever one begins or ends."""

    def __init__(self, env: simpy.Environment, token_time: TokenTime) -> None:
        self._env = env
        self._token_time = token_time
        self._iterations = 0.0  # so far, counted while anything runs
        self._counted_at = 0.0
        self._requests: list[tuple[float, int, simpy.Event]] = []  # by the iteration at which they end
        self._numbers = itertools.count()
        self._timer = 0  # the newest one; older timers are ignored

    def generate(self, num_tokens: float) -> simpy.Event:
        """An event that is triggered after `num_tokens` iterations of the request."""
        self._advance()
        done = self._env.event()
        heapq.heappush(self._requests, (self._iterations + num_tokens, next(self._numbers), done))
        self._arm()
        return done

    def _advance(self) -> None:
        if self._requests:
            self._iterations += (self._env.now - self._counted_at) / self._token_time.of(len(self._requests))
        self._counted_at = self._env.now

    def _arm(self) -> None:
        self._timer += 1
        if not self._requests:
            return
        left = max(0.0, self._requests[0][0] - self._iterations)
        timeout = self._env.timeout(left * self._token_time.of(len(self._requests)))
        timeout.callbacks.append(partial(self._end_first, timer=self._timer))

    def _end_first(self, _: simpy.Event, *, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        heapq.heappop(self._requests)[2].succeed()
        self._arm()
