"""Which hosts are wanted in which market, computed by hand."""

import dataclasses
import random

import pytest

from slipstream.tools.launch.market import (
    Assumed,
    Experience,
    Limits,
    Market,
    Place,
    decide,
    losses_per_hour,
    useful_hours_per_dollar,
)

A, B, HOME = Place("spot", "a"), Place("spot", "b"), Place("reserved", "home")
ASSUMED = Assumed(start_hours=0.1, losses_per_hour=0.1, lost_work_hours=0.02)
LIMITS = Limits(budget=10.0, fewest=1, most=8, max_change=8)


def at(place: Place, dollars: float, most: int | None = None) -> Market:
    return Market(place=place, dollars_per_hour=dollars, most=most)


def wanted(
    *markets: Market,
    have: dict[Place, int] | None = None,
    advised: int = 4,
    seen: dict[Place, Experience] | None = None,
    **limits: float,
) -> dict[Place, int]:
    return decide(
        markets,
        have or {},
        advised=advised,
        limits=dataclasses.replace(LIMITS, **limits),  # type: ignore[arg-type]
        seen=seen or {},
        assumed=ASSUMED,
    ).wanted


def test_useful_hours_per_dollar_by_hand() -> None:
    """0.5 losses an hour: a cycle of 0.1 + 2 hours is paid, 2 - 0.02 of them are useful; at 0.50 $ that is 1.886."""
    found = useful_hours_per_dollar(0.5, losses_per_hour=0.5, start_hours=0.1, lost_work_hours=0.02)
    assert found == pytest.approx(1.98 / (2.1 * 0.5)) == pytest.approx(1.8857, abs=1e-4)
    assert useful_hours_per_dollar(0.5, losses_per_hour=0.0, start_hours=0.1, lost_work_hours=0.02) == 2.0
    assert useful_hours_per_dollar(0.5, losses_per_hour=60.0, start_hours=0.1, lost_work_hours=0.02) == 0.0


def test_what_was_seen_replaces_what_was_assumed() -> None:
    assert losses_per_hour(A, Experience(), ASSUMED) == pytest.approx(0.1)
    assert losses_per_hour(A, Experience(num_lost=3, host_hours=20.0), ASSUMED) == pytest.approx(4 / 30)
    assert losses_per_hour(HOME, Experience(host_hours=20.0), ASSUMED) == 0.0
    assert losses_per_hour(HOME, Experience(num_lost=3, host_hours=20.0), ASSUMED) == pytest.approx(0.1)


def test_the_cheapest_of_equal_markets_gets_all_hosts_that_are_advised() -> None:
    assert wanted(at(A, 0.5), at(B, 0.4), at(HOME, 1.0)) == {B: 4}


def test_a_market_that_loses_hosts_must_be_cheaper_by_what_that_costs() -> None:
    """90 losses in 90 hours: r = 91 / 100, and each lost 0.5 h: (1 - 0.455) / 1.091 = 0.4995 useful.

    At 0.40 $ that is 1.249 an hour and dollar. The reserved market gives 1 / 0.7 = 1.429, or at 0.9 $ 1.111.
    """
    seen = {A: Experience(num_lost=90, host_hours=90.0, lost_work_hours=45.0)}
    assert wanted(at(A, 0.4), at(HOME, 0.7), seen=seen) == {HOME: 4}
    assert wanted(at(A, 0.4), at(HOME, 0.9), seen=seen) == {A: 4}
    assert wanted(at(A, 0.4), at(HOME, 0.7)) == {A: 4}


def test_the_budget_and_the_limits_of_markets_bound_the_hosts() -> None:
    assert wanted(at(B, 0.4, most=2), at(A, 0.5), budget=1.5) == {B: 2, A: 1}  # 0.8 + 0.5; 0.2 $ are left
    assert wanted(at(B, 0.3), budget=0.9) == {B: 3}  # in spite of rounding
    assert wanted(at(B, 0.4, most=0), at(A, 0.5), budget=0.45) == {}
    assert wanted(at(B, 0.4), advised=20) == {B: 8}
    assert wanted(at(B, 0.4), advised=1, fewest=3) == {B: 3}
    assert wanted(at(B, 0.4), advised=1, fewest=3, budget=0.8) == {B: 2}


def test_a_host_stays_unless_another_market_is_better_by_a_fifth() -> None:
    assert wanted(at(A, 0.5), at(B, 0.42), have={A: 4}) == {A: 4}  # 0.5 / 0.42 = 1.19
    assert wanted(at(A, 0.5), at(B, 0.41), have={A: 4}) == {A: 0, B: 4}  # 1.22
    assert wanted(at(A, 0.5), at(B, 0.42), have={A: 3}) == {A: 3, B: 1}  # what is added goes to the best


def test_one_decision_adds_and_ends_no_more_hosts_than_may_change() -> None:
    assert wanted(at(B, 0.4), max_change=1, have={B: 1}) == {B: 2}
    assert wanted(at(B, 0.4), max_change=1, have={B: 7}) == {B: 6}
    assert wanted(at(A, 0.9), at(B, 0.4), max_change=1, have={A: 4}) == {A: 3, B: 1}
    # The fleet is too dear: while it shrinks, nothing is added, though the other market is better.
    assert wanted(at(A, 0.9), at(B, 0.4), max_change=1, have={A: 8}) == {A: 7}
    assert wanted(at(A, 0.9), at(B, 0.4), max_change=2, have={A: 4}, budget=0.9) == {A: 2}


def test_hosts_of_a_market_without_a_price_stay_and_none_is_added() -> None:
    unpriced = Market(place=A, dollars_per_hour=0.9, most=2, is_priced=False)
    assert wanted(unpriced, at(B, 0.1), have={A: 2}) == {A: 2, B: 2}
    assert wanted(dataclasses.replace(unpriced, dollars_per_hour=0.0), at(B, 0.1), have={A: 2}) == {A: 2, B: 2}
    assert wanted(unpriced, at(B, 0.1), have={A: 2}, advised=1) == {A: 1}


def test_decisions_do_not_depend_on_the_order_of_the_markets() -> None:
    markets = [at(A, 0.5, most=3), at(B, 0.5, most=3), at(HOME, 0.5)]
    assert wanted(*markets) == wanted(*reversed(markets)) == {HOME: 4}
    assert wanted(*markets[:2]) == wanted(markets[1], markets[0]) == {A: 3, B: 1}


def test_a_decision_repeated_until_nothing_changes_ends_within_the_budget() -> None:
    """Random prices, fleets and limits: no decision changes more than it may, and none comes back to an earlier one."""
    chance = random.Random(0)
    for _ in range(300):
        markets = [at(place, round(chance.uniform(0.1, 2), 2), chance.choice([None, 0, 3])) for place in (A, B, HOME)]
        have = {place: chance.randrange(6) for place in (A, B, HOME)}
        limits = dataclasses.replace(LIMITS, budget=chance.uniform(0.1, 6), max_change=chance.randint(1, 4))
        advised = chance.randrange(12)
        for _ in range(40):
            now = decide(markets, have, advised=advised, limits=limits, seen={}, assumed=ASSUMED).wanted
            new = {place: now.get(place, 0) for place in have}
            assert sum(max(0, new[place] - have[place]) for place in have) <= limits.max_change
            assert sum(max(0, have[place] - new[place]) for place in have) <= limits.max_change
            if new == have:
                break
            have = new
        else:
            pytest.fail(f"never settles: {markets}, {limits}, {advised}")
        assert sum(have[market.place] * market.dollars_per_hour for market in markets) <= limits.budget + 1e-6
        assert sum(have.values()) <= max(advised, limits.fewest)


def test_the_reason_is_one_line_with_the_numbers_that_decided() -> None:
    markets = [at(A, 0.5), at(B, 0.25, most=2)]
    limits = dataclasses.replace(LIMITS, budget=1.0, max_change=2)
    found = decide(markets, {A: 1}, advised=9, limits=limits, seen={}, assumed=Assumed(losses_per_hour=0.0))
    assert found.why == (
        "9 hosts advised, 1 run; the limits make that 8; 1.00 $/h and the markets' limits allow 3; "
        "spot b 0 -> 2 (0.250 $/h, 4.00 useful hours per $); 1.00 $/h"
    )
    still = decide(markets, {A: 1, B: 2}, advised=3, limits=limits, seen={}, assumed=ASSUMED)
    assert still.why == "3 hosts advised, 3 run; nothing changes; 1.00 $/h"
