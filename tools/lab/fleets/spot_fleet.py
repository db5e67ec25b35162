"""A simulated run whose hosts are in simulated markets: prices and losses follow traces, and a policy orders hosts."""

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from slipstream.tools.launch.market import Experience, Market, Place
from slipstream.tools.simulate.world import Actor, World

SLOT_S = 600.0  # a trace has one value for each
TICK_S = 60.0  # how often the policy orders, and every host is paid
NOTICED = 0.75  # of the losses come with a notice, and the host leaves in order; the others are kills


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The price of a host, and the losses of one host in an hour, in every SLOT_S."""

    place: Place
    dollars_per_hour: Sequence[float]
    losses_per_hour: Sequence[float]

    def market(self, now_s: float) -> Market:
        return Market(place=self.place, dollars_per_hour=self.dollars_per_hour[self._slot(now_s)])

    def rate(self, now_s: float) -> float:
        return self.losses_per_hour[self._slot(now_s)]

    def _slot(self, now_s: float) -> int:
        return min(int(now_s / SLOT_S), len(self.dollars_per_hour) - 1)


def spot_trace(place: Place, *, dollars: float, losses: float, num_slots: int, seed: int) -> Trace:
    """A price around `dollars`, and `losses` an hour; one slot in 30 begins a shortage of six.

    In a shortage the price is 2.5 times as high, and hosts are lost ten times as often.
    """
    chance, drift, left = random.Random(f"{place} {seed}"), 1.0, 0
    prices, rates = [], []
    for _ in range(num_slots):
        drift = min(max(drift * chance.uniform(0.93, 1.075), 0.7), 1.4)
        left = left - 1 if left else 6 * (chance.random() < 1 / 30)
        prices.append(round(dollars * drift * (2.5 if left else 1.0), 4))
        rates.append(losses * (10.0 if left else 1.0))
    return Trace(place=place, dollars_per_hour=prices, losses_per_hour=rates)


Policy = Callable[[Sequence[Market], Mapping[Place, int], Mapping[Place, Experience], int], Mapping[Place, int]]
"""Returns the wanted hosts, from markets, serving hosts, experience and advice."""


@dataclass(kw_only=True, slots=True, eq=False)
class Host:
    """A host from its order to its end, with one actor."""

    place: Place
    actor: Actor | None = None  # None while it starts
    ended: bool = False
    served_since_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Bill:
    """What a fleet has cost and lost so far."""

    dollars: float = 0.0
    num_preempted: int = 0  # in order, after a notice
    num_killed: int = 0
    lost_tokens: int = 0  # of episodes that begin again
    moves: int = 0  # hosts that the policy ended
    by_step: list[float] = field(default_factory=list)  # dollars at the end of each optimizer step
    host_hours: dict[Place, float] = field(default_factory=lambda: defaultdict(float))  # paid


class SpotFleet:
    """The hosts of a simulated run. A lost host is ordered again, as a cluster engine does."""

    def __init__(self, world: World, traces: Sequence[Trace], policy: Policy, *, start_s: float, seed: int) -> None:
        self.bill = Bill()
        self._world, self._env = world, world.env
        self._traces = {trace.place: trace for trace in traces}
        self._policy, self._start_s = policy, start_s
        self._random = random.Random(seed)
        self._hosts = list[Host]()
        self.seen: dict[Place, Experience] = defaultdict(Experience)
        world.env.process(self._run())

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._order()
            self._pay()
            yield self._env.timeout(TICK_S)

    def _order(self) -> None:
        markets = [trace.market(self._env.now) for trace in self._traces.values()]
        serving = defaultdict[Place, int](int)
        for host in self._hosts:
            serving[host.place] += host.actor is not None
        wanted = self._policy(markets, dict(serving), self.seen, self._world.advised_actors())
        for place in self._traces:
            hosts = [host for host in self._hosts if host.place == place]
            surplus = len(hosts) - wanted.get(place, 0)
            for host in sorted(hosts, key=lambda host: host.actor is not None)[: max(surplus, 0)]:
                self.bill.moves += host.actor is not None
                self._end(host, killed=False)
            for _ in range(-surplus):
                self._hosts.append(Host(place=place))
                self._env.process(self._live(self._hosts[-1]))

    def _pay(self) -> None:
        for host in self._hosts:
            self.bill.dollars += self._traces[host.place].market(self._env.now).dollars_per_hour * TICK_S / 3600
            self.bill.host_hours[host.place] += TICK_S / 3600
            if host.actor:
                self._add(host.place, host_hours=TICK_S / 3600)
        self.settle()

    def settle(self) -> None:
        """Note the dollars of the steps that were made since the last tick."""
        missing = len(self._world.loads) - len(self.bill.by_step)
        self.bill.by_step += [self.bill.dollars] * missing

    def _live(self, host: Host) -> Generator[simpy.Event, Any, None]:
        """Start, serve, and be lost by chance; the chance is drawn for every tick, as rates change."""
        yield self._env.timeout(self._start_s)
        if host.ended:
            return
        host.actor, host.served_since_s = self._world.add_actor(), self._env.now
        while not host.ended:
            yield self._env.timeout(TICK_S)
            rate = self._traces[host.place].rate(self._env.now)
            if not host.ended and self._random.random() < rate * TICK_S / 3600:
                self._lose(host)

    def _lose(self, host: Host) -> None:
        killed = self._random.random() > NOTICED
        self.bill.num_killed += killed
        self.bill.num_preempted += not killed
        actor, served_hours = host.actor, (self._env.now - host.served_since_s) / 3600
        lost_tokens = self._end(host, killed=killed)
        self.bill.lost_tokens += lost_tokens
        share = lost_tokens / max(actor.num_sampled, 1) if actor else 0.0
        self._add(host.place, num_lost=1, lost_work_hours=served_hours * share)

    def _end(self, host: Host, *, killed: bool) -> int:
        host.ended = True
        self._hosts.remove(host)
        return self._world.end_actor(host.actor, killed=killed) if host.actor else 0

    def _add(self, place: Place, *, num_lost: int = 0, host_hours: float = 0.0, lost_work_hours: float = 0.0) -> None:
        before = self.seen[place]
        self.seen[place] = Experience(
            num_lost=before.num_lost + num_lost,
            host_hours=before.host_hours + host_hours,
            lost_work_hours=before.lost_work_hours + lost_work_hours,
        )
