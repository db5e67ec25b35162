"""An inference engine in simulated time: every iteration gives each running request one token."""

import heapq
import itertools
from dataclasses import dataclass, field
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


@dataclass(kw_only=True, slots=True)
class Host:
    """Cores that are shared equally by the engines which have requests; with enough of them, each has its own."""

    num_cores: int
    engines: list["SimulatedEngine"] = field(default_factory=list)

    def slowdown(self) -> float:
        """How many times longer an iteration takes: three busy engines on two cores take 1.5 times as long."""
        return max(1.0, sum(engine.is_busy for engine in self.engines) / self.num_cores)


class SimulatedEngine:
    """Requests share its iterations; the next end is computed again whenever one begins or ends on its host."""

    def __init__(self, env: simpy.Environment, token_time: TokenTime, host: Host) -> None:
        self._env = env
        self._token_time = token_time
        self._host = host
        self._iterations = 0.0  # so far, counted while anything runs
        self._counted_at = 0.0
        self._requests: list[tuple[float, int, simpy.Event]] = []  # by the iteration at which they end
        self._numbers = itertools.count()
        self._timer = 0  # the newest one; older timers are ignored
        host.engines.append(self)

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def generate(self, num_tokens: float) -> simpy.Event:
        """An event that is triggered after `num_tokens` iterations of the request."""
        self._advance_all()
        done = self._env.event()
        heapq.heappush(self._requests, (self._iterations + num_tokens, next(self._numbers), done))
        self._arm_all()
        return done

    def _iteration_s(self) -> float:
        return self._token_time.of(len(self._requests)) * self._host.slowdown()

    def _advance_all(self) -> None:
        for engine in self._host.engines:
            if engine.is_busy:
                engine._iterations += (self._env.now - engine._counted_at) / engine._iteration_s()
            engine._counted_at = self._env.now

    def _arm_all(self) -> None:
        for engine in self._host.engines:
            engine._timer += 1
            if engine.is_busy:
                left = max(0.0, engine._requests[0][0] - engine._iterations)
                timeout = self._env.timeout(left * engine._iteration_s())
                timeout.callbacks.append(partial(engine._end_first, timer=engine._timer))

    def _end_first(self, _: simpy.Event, *, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance_all()
        heapq.heappop(self._requests)[2].succeed()
        self._arm_all()
