"""Decides how many hosts of actors to run in each market, from prices, losses, advice and a budget.

A market is a kind of instance in a zone. Everything here is a pure function of numbers;
`slipstream.tools.launch.follow` gathers them, and a study simulates them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PRIOR_HOURS = 10.0  # the assumed rate of losses counts as much as this many observed host-hours
KEEP = 1.2  # a host that runs stays, unless one elsewhere is worth this much more: a move costs a start


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where a host runs."""

    kind: str  # "reserved" or "spot"
    zone: str

    def __str__(self) -> str:
        return f"{self.kind} {self.zone}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """The offer of a place."""

    place: Place
    dollars_per_hour: float  # of one host
    most: int | None = None  # hosts that it can have; None for no limit
    is_priced: bool = True  # False: no price is known now; what runs there stays, at the price that it reports


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What a run saw in one place."""

    num_lost: int = 0  # hosts that were taken away
    host_hours: float = 0.0
    lost_work_hours: float = 0.0  # summed over the lost hosts: the time that they spent on tokens which were not kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What cannot be read from a run's records, or has not been seen yet."""

    start_hours: float = 5 / 60  # from the order of a host to its first episode; it is paid, and useless
    losses_per_hour: float = 0.05  # of one spot host
    lost_work_hours: float = 1 / 60  # of a lost host


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    budget: float  # dollars an hour
    fewest: int  # hosts
    most: int
    max_change: int  # hosts that one decision adds at most, and that it ends at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    wanted: dict[Place, int]  # of each place that has or gets hosts
    why: str  # one line


def losses_per_hour(place: Place, seen: Experience, assumed: Assumed) -> float:
    """The losses of one host in an hour: those seen, and an assumption that fades.

        (num_lost + assumed * PRIOR_HOURS) / (host_hours + PRIOR_HOURS)

    With 3 losses in 20 host-hours and 0.05 assumed: (3 + 0.5) / 30 = 0.117. Of reserved hosts, 0 is assumed.
    """
    prior = assumed.losses_per_hour if place.kind == "spot" else 0.0
    return (seen.num_lost + prior * PRIOR_HOURS) / (seen.host_hours + PRIOR_HOURS)


def useful_hours_per_dollar(
    dollars_per_hour: float, *, losses_per_hour: float, start_hours: float, lost_work_hours: float
) -> float:
    """The expected hours of useful work that a dollar buys.

    A host with r losses an hour starts for s hours, works for 1 / r hours, and loses the last w of them; all is paid:

        (1 / r - w) / (s + 1 / r) / price  =  (1 - r w) / (1 + r s) / price

    At 0.50 $, r = 0.5, s = 0.1, w = 0.02: 0.99 / 1.05 / 0.50 = 1.886.
    """
    useful = max(0.0, 1 - losses_per_hour * lost_work_hours)
    return useful / (1 + losses_per_hour * start_hours) / dollars_per_hour


def decide(
    markets: Sequence[Market],
    have: Mapping[Place, int],
    *,
    advised: int,
    limits: Limits,
    seen: Mapping[Place, Experience],
    assumed: Assumed,
) -> Decision:
    """The hosts to have in each market now; `advised` are the hosts that the run can use. Deterministic.

    The best hosts per dollar are taken first, up to the advised number and the budget; then at most `max_change` steps
    are made from what runs to that. `markets` must have every place of `have`.
    """
    worth = {market.place: _worth(market, seen.get(market.place, Experience()), assumed) for market in markets}
    target = min(max(advised, limits.fewest), limits.most)
    ideal = _ideal(markets, have, worth=worth, target=target, budget=limits.budget)
    wanted = _steps_towards(ideal, markets, have, worth=worth, limits=limits)
    return Decision(
        wanted=wanted,
        why=_why(markets, have, wanted, worth=worth, advised=advised, target=target, ideal=ideal, limits=limits),
    )


def _worth(market: Market, seen: Experience, assumed: Assumed) -> float:
    """The useful hours per dollar of a market; infinite without a price."""
    if not market.is_priced:
        return math.inf
    return useful_hours_per_dollar(
        market.dollars_per_hour,
        losses_per_hour=losses_per_hour(market.place, seen, assumed),
        start_hours=assumed.start_hours,
        lost_work_hours=seen.lost_work_hours / seen.num_lost if seen.num_lost else assumed.lost_work_hours,
    )


def _ideal(
    markets: Sequence[Market],
    have: Mapping[Place, int],
    *,
    worth: Mapping[Place, float],
    target: int,
    budget: float,
) -> dict[Place, int]:
    """At most `target` hosts within the budget, the most useful hours per dollar first; those that run count KEEP."""
    offers = []
    for market in markets:
        running, value = have.get(market.place, 0), worth[market.place]
        more = target if market.most is None else market.most
        offers.append((-KEEP * value, market.place, market.dollars_per_hour, min(running, max(more, 0))))
        offers.append((-value, market.place, market.dollars_per_hour, max(more - running, 0)))
    ideal, left = {market.place: 0 for market in markets}, budget
    for _, place, price, count in sorted(offers):
        count = min(count, target - sum(ideal.values()), _affordable(left, price))
        ideal[place] += count
        left -= count * price
    return ideal


def _affordable(dollars: float, price: float) -> int:
    """How many hosts the dollars pay; 3 at 0.3 $ of 0.9 $, in spite of rounding."""
    return math.floor(max(dollars, 0.0) / price + 1e-9) if price else 1 << 30


def _steps_towards(
    ideal: Mapping[Place, int],
    markets: Sequence[Market],
    have: Mapping[Place, int],
    *,
    worth: Mapping[Place, float],
    limits: Limits,
) -> dict[Place, int]:
    """End the least useful surplus hosts, then add the most useful missing ones within the budget."""
    wanted = {market.place: have.get(market.place, 0) for market in markets}
    prices = {market.place: market.dollars_per_hour for market in markets}
    ranking = sorted(wanted, key=lambda place: (-worth[place], place))
    left = limits.max_change
    for place in reversed(ranking):
        count = min(left, max(0, wanted[place] - ideal[place]))
        wanted[place] -= count
        left -= count
    left = min(limits.max_change, sum(ideal.values()) - sum(wanted.values()))
    for place in ranking:
        dollars = limits.budget - sum(wanted[other] * prices[other] for other in wanted)
        count = max(0, min(left, ideal[place] - wanted[place], _affordable(dollars, prices[place])))
        wanted[place] += count
        left -= count
    return {place: count for place, count in wanted.items() if count or have.get(place, 0)}


def _why(
    markets: Sequence[Market],
    have: Mapping[Place, int],
    wanted: Mapping[Place, int],
    *,
    worth: Mapping[Place, float],
    advised: int,
    target: int,
    ideal: Mapping[Place, int],
    limits: Limits,
) -> str:
    """One line: what was asked for, what limited it, and each change with the numbers that decided."""
    prices = {market.place: market.dollars_per_hour for market in markets}
    parts = [f"{advised} hosts advised, {sum(have.values())} run"]
    if target != advised:
        parts.append(f"the limits make that {target}")
    if (allowed := sum(ideal.values())) < target:
        parts.append(f"{limits.budget:.2f} $/h and the markets' limits allow {allowed}")
    changed = [place for place in sorted(wanted) if wanted[place] != have.get(place, 0)]
    parts += [
        f"{place} {have.get(place, 0)} -> {wanted[place]} ({prices[place]:.3f} $/h, {_rounded(worth[place])})"
        for place in changed
    ]
    if not changed:
        parts.append("nothing changes")
    elif any(ideal[place] != wanted.get(place, 0) for place in ideal):
        parts.append(f"at most {limits.max_change} at a time")
    return "; ".join([*parts, f"{sum(wanted[place] * prices[place] for place in wanted):.2f} $/h"])


def _rounded(worth: float) -> str:
    return "no price now" if math.isinf(worth) else f"{worth:.2f} useful hours per $"
