"""The study of markets: a simulated run whose hosts are lost, moved and paid, and a fleet that follows prices."""

import dataclasses

import pytest

from slipstream.tools.lab.fleets import markets
from slipstream.tools.lab.fleets.markets import (
    FACTS,
    FLEETS,
    HOME,
    NUM_HOSTS,
    curve,
    follows,
    play,
    stays_in,
    success_at,
    table,
)
from slipstream.tools.lab.fleets.spot_fleet import Policy, SpotFleet, Trace, spot_trace
from slipstream.tools.launch.market import Place
from slipstream.tools.simulate.plan import Plan
from slipstream.tools.simulate.world import World

A, B = Place("spot", "a"), Place("spot", "b")
PLAN = Plan(
    num_actors=0,
    max_episodes=16,
    group_size=8,
    groups_per_step=4,
    step_scale=1.0,
    num_shards=1,
    target_lag=2,
    max_lag=8,
    steps=20,
    lease_ttl_s=30.0,
    price_per_hour=0.0,
    preemptions_per_hour=0.0,
    kills_per_hour=0.0,
    restart_s=0.0,
    seed=0,
)


def flat(place: Place, *dollars: float, losses: float = 0.0) -> Trace:
    return Trace(place=place, dollars_per_hour=dollars, losses_per_hour=[losses] * len(dollars))


def run(traces: list[Trace], policy: Policy, **changes: int) -> tuple[World, SpotFleet]:
    world = World(dataclasses.replace(PLAN, **changes), FACTS)  # type: ignore[arg-type]
    fleet = SpotFleet(world, traces, policy, start_s=300.0, seed=0)
    world.run()
    fleet.settle()
    return world, fleet


def test_a_fleet_that_stays_pays_every_host_from_its_order_on() -> None:
    """Eight hosts at 0.50 $ for all of the run, to the minute, and the first step needs the start of 300 s too."""
    world, fleet = run([flat(A, 0.5)], stays_in(A))
    hours = world.env.now / 3600
    assert fleet.bill.dollars == pytest.approx(NUM_HOSTS * 0.5 * hours, abs=NUM_HOSTS * 0.5 / 60)
    assert len(fleet.bill.by_step) == 30 and fleet.bill.by_step[0] >= NUM_HOSTS * 0.5 * 300 / 3600
    assert sum(fleet.bill.host_hours.values()) * 0.5 == pytest.approx(fleet.bill.dollars)


def test_a_run_makes_all_its_steps_while_its_hosts_are_lost() -> None:
    world, fleet = run([flat(A, 0.5, losses=4.0)], stays_in(A), steps=40)
    assert fleet.bill.num_preempted + fleet.bill.num_killed > 20 and fleet.bill.num_killed > 2
    assert len(fleet.bill.by_step) == 50
    assert 0 < fleet.bill.lost_tokens < world.num_sampled / 4
    seen = fleet.seen[A]
    assert seen.num_lost == fleet.bill.num_preempted + fleet.bill.num_killed and seen.lost_work_hours > 0


def test_a_fleet_that_follows_leaves_a_market_whose_price_has_risen_or_that_loses_its_hosts() -> None:
    dearer = [flat(A, 0.4, *[1.0] * 20), flat(B, 0.5)]
    world, fleet = run(dearer, follows(4, 4), steps=40)
    # Ten minutes in a; then all four move at once, and are paid in b until the end.
    assert fleet.bill.moves == 4
    assert fleet.bill.host_hours[A] == pytest.approx(4 * 600 / 3600)
    assert fleet.bill.host_hours[B] == pytest.approx(4 * (world.env.now - 600) / 3600, abs=0.1)
    losing = [flat(A, 0.4, losses=30.0), flat(B, 0.5)]
    assert run(losing, follows(4, 4), steps=40)[1].bill.host_hours[B] > 1


def test_the_markets_and_the_runs_of_a_seed_are_the_same_again() -> None:
    trace = spot_trace(A, dollars=0.4, losses=0.2, num_slots=600, seed=3)
    assert trace == spot_trace(A, dollars=0.4, losses=0.2, num_slots=600, seed=3)
    assert trace != spot_trace(A, dollars=0.4, losses=0.2, num_slots=600, seed=4)
    assert {round(rate, 3) for rate in trace.losses_per_hour} == {0.2, 2.0}
    rows = [play("follows prices", seed=1, steps=14, points=curve()) for _ in range(2)]
    assert rows[0] == rows[1]


def test_a_short_study_has_a_row_for_each_fleet_and_following_costs_less_than_reserved_hosts() -> None:
    rows = [play(fleet, seed=0, steps=14, points=curve()) for fleet in FLEETS]
    assert [line.split(" | ")[0] for line in table(rows).splitlines()[2:]] == [f"| {fleet}" for fleet in FLEETS]
    dollars = {row.fleet: row.dollars for row in rows}
    assert dollars["follows prices"] < dollars["fixed, reserved"] / 2
    assert all(row.dollars_to_goal is None and "never" in table([row]) for row in rows)
    assert rows[0].host_hours.keys() == {str(HOME)}


def test_the_curve_of_success_is_a_line_between_the_measured_points() -> None:
    points = [markets.Point(0, 0.4), markets.Point(20, 0.6), markets.Point(40, 0.7)]
    assert success_at(points, 0) == 0.4 and success_at(points, 5) == pytest.approx(0.45)
    assert success_at(points, 20) == 0.6 and success_at(points, 99) == 0.7
    assert [point.step for point in curve()] == list(range(0, 201, 20))
