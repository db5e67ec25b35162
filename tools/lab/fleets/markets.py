"""`make study-markets`: a run that follows the prices of three spot markets, beside fleets that stay where they are.

All of it is simulated: the run by `slipstream.tools.simulate.world`, prices and losses by seeded traces. The decisions
are made by `slipstream.tools.launch.market.decide`, the function that `slipstream scale` calls.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.common.process.run_dir import write_whole
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.fleets.spot_fleet import Policy, SpotFleet, Trace, spot_trace
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.launch.market import Assumed, Experience, Limits, Market, Place, decide
from slipstream.tools.simulate.calibration import Calibration, PlayedTurn
from slipstream.tools.simulate.engine import TokenTime
from slipstream.tools.simulate.plan import Plan
from slipstream.tools.simulate.world import World

HOME = Place("reserved", "home")
SPOT = (Place("spot", "a"), Place("spot", "b"), Place("spot", "c"))
RESERVED_PRICE = 1.2  # dollars an hour of one host
SPOT_PRICES, SPOT_LOSSES = (0.40, 0.44, 0.52), (0.25, 0.15, 0.05)  # dollars and losses an hour, in ordinary times
NUM_HOSTS = 8  # of the fleets that stay
BUDGET, MAX_CHANGE = NUM_HOSTS * RESERVED_PRICE, 4
START_S = 300.0
ASSUMED = Assumed(start_hours=START_S / 3600)
NUM_SLOTS = 600  # of the traces: 100 hours
CURVE = Path("docs/studies/goodput.json")  # held-out success of the quickstart by step
CURVE_ARM = "grpo"
GOAL = 0.8

# The run. A host with 16 episodes samples 6.4 tokens/s in each of them: 0.06 + 16 * 0.006 s a token.
FACTS = Calibration(
    episodes=[
        [PlayedTurn(num_tokens=tokens, env_s=env_s)] * turns
        for tokens, env_s, turns in ((120, 6.0, 5), (200, 12.0, 5), (320, 20.0, 6))
    ],
    turn_s=1.0,
    token_time=TokenTime(fixed_s=0.06, per_request_s=0.006),
    step_s=[110.0, 120.0, 130.0],
    groups_per_step=16,
    group_size=8,
    useful_share=1.0,
    failed_share=0.0,
    refresh_s=5.0,
    num_actors=NUM_HOSTS,
    steps_per_hour=0.0,
    lag=0.0,
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    fleet: str
    seed: int
    steps: int
    hours: float
    dollars: float
    dollars_to_goal: float | None  # until the curve of success reaches GOAL
    success: float  # by the curve, after all steps
    lag: float
    num_hosts: float  # paid, as a mean
    preempted: int
    killed: int
    moved: int
    lost_tokens_share: float  # of the sampled tokens, in episodes that began again
    host_hours: dict[str, float]  # paid, by market


class Point(msgspec.Struct, frozen=True):
    step: float
    success: float


def curve() -> list[Point]:
    """The quickstart's held-out success by step, as a mean over the seeds of the study of goodput."""
    found: dict[int, list[float]] = {}
    for result in msgspec.json.decode(CURVE.read_bytes())["results"]:
        if result["arm"] == CURVE_ARM:
            for point in result["points"]:
                found.setdefault(20 * round(point["step"] / 20), []).append(point["success"])
    return [Point(step, statistics.fmean(values)) for step, values in sorted(found.items())]


def success_at(points: Sequence[Point], step: float) -> float:
    """The success at a step: a straight line between two points, and the last point after it."""
    for before, after in itertools.pairwise(points):
        if step < after.step:
            share = (step - before.step) / (after.step - before.step)
            return before.success + share * (after.success - before.success)
    return points[-1].success


def follows(fewest: int, most: int) -> Policy:
    """The policy of `slipstream scale --prices`, with --min-hosts and --max-hosts."""
    limits = Limits(budget=BUDGET, fewest=fewest, most=most, max_change=MAX_CHANGE)

    def policy(
        markets: Sequence[Market], have: Mapping[Place, int], seen: Mapping[Place, Experience], advised: int
    ) -> Mapping[Place, int]:
        return decide(markets, have, advised=advised, limits=limits, seen=seen, assumed=ASSUMED).wanted

    return policy


def stays_in(place: Place) -> Policy:
    """The policy of a fleet that has NUM_HOSTS hosts in one place."""
    return lambda markets, have, seen, advised: {place: NUM_HOSTS}


FLEETS: dict[str, Policy] = {
    "fixed, reserved": stays_in(HOME),
    **{f"fixed, {place}": stays_in(place) for place in SPOT},
    "follows prices": follows(NUM_HOSTS, NUM_HOSTS),
    "follows prices and advice": follows(1, 12),
}


def traces_of(seed: int) -> list[Trace]:
    """The markets of one seed, the same for all fleets."""
    reserved = Trace(place=HOME, dollars_per_hour=[RESERVED_PRICE], losses_per_hour=[0.0])
    offers = zip(SPOT, SPOT_PRICES, SPOT_LOSSES, strict=True)
    return [
        reserved,
        *(
            spot_trace(place, dollars=price, losses=losses, num_slots=NUM_SLOTS, seed=seed)
            for place, price, losses in offers
        ),
    ]


def play(fleet: str, *, seed: int, steps: int, points: Sequence[Point]) -> Row:
    """Simulate one run of `steps` optimizer steps; the first ten are not measured, but paid."""
    plan = Plan(
        num_actors=0,
        max_episodes=16,
        group_size=8,
        groups_per_step=16,
        step_scale=1.0,
        num_shards=1,
        target_lag=2,
        max_lag=8,
        steps=steps - 10,
        lease_ttl_s=30.0,
        price_per_hour=0.0,
        preemptions_per_hour=0.0,
        kills_per_hour=0.0,
        restart_s=0.0,
        seed=seed,
    )
    world = World(plan, FACTS)
    spot = SpotFleet(world, traces_of(seed), FLEETS[fleet], start_s=START_S, seed=seed)
    outcome, hours = world.run(), world.env.now / 3600
    spot.settle()
    bill = spot.bill
    reached = (step for step, _ in enumerate(bill.by_step, start=1) if success_at(points, step) >= GOAL)
    goal = next(reached, None)
    return Row(
        fleet=fleet,
        seed=seed,
        steps=steps,
        hours=hours,
        dollars=bill.dollars,
        dollars_to_goal=None if goal is None else bill.by_step[goal - 1],
        success=success_at(points, steps),
        lag=outcome.lag,
        num_hosts=sum(bill.host_hours.values()) / hours,
        preempted=bill.num_preempted,
        killed=bill.num_killed,
        moved=bill.moves,
        lost_tokens_share=bill.lost_tokens / max(world.num_sampled, 1),
        host_hours={str(place): round(hours, 2) for place, hours in sorted(bill.host_hours.items())},
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown: a mean for each fleet, and the lowest and the highest of its seeds."""
    head = [
        "fleet",
        "hosts",
        "hours",
        "dollars",
        f"dollars to {GOAL:.0%}",
        "success per 10 $",
        "mean lag",
        "lost in order",
        "killed",
        "moved",
        "tokens lost",
    ]
    cells = []
    for fleet in dict.fromkeys(row.fleet for row in rows):
        of = [row for row in rows if row.fleet == fleet]
        goals = [row.dollars_to_goal for row in of if row.dollars_to_goal is not None]
        cells.append(
            [
                fleet,
                f"{statistics.fmean(row.num_hosts for row in of):.1f}",
                _spread([row.hours for row in of], ".1f"),
                _spread([row.dollars for row in of], ".1f"),
                _spread(goals, ".1f") if len(goals) == len(of) else "never",
                _spread([10 * row.success / row.dollars for row in of], ".3f"),
                _spread([row.lag for row in of], ".2f"),
                _spread([row.preempted for row in of], ".0f"),
                _spread([row.killed for row in of], ".0f"),
                _spread([row.moved for row in of], ".0f"),
                _spread([100 * row.lost_tokens_share for row in of], ".2f", unit=" %"),
            ]
        )
    return markdown(head, cells)


def _spread(values: Sequence[float], form: str, *, unit: str = "") -> str:
    mean, low, high = (format(value, form) for value in (statistics.fmean(values), min(values), max(values)))
    return f"**{mean}{unit}** ({low} to {high})" if low != high else f"**{mean}{unit}**"


def main(arguments: Sequence[str]) -> None:
    """Simulate every fleet with every seed, and write the page."""
    parser = argparse.ArgumentParser(prog="study_markets", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run, more than 10")
    parser.add_argument("--seeds", type=int, default=5, help="sets of traces")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is written")
    options = parser.parse_args(arguments)
    points, rows = curve(), []
    for seed in range(options.seeds):
        for fleet in FLEETS:
            rows.append(play(fleet, seed=seed, steps=options.steps, points=points))
            print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    command = " ".join(["python -m slipstream.tools.lab.fleets.markets", *arguments])
    raw = {"command": command, "date": today(), "rows": msgspec.to_builtins(rows)}
    write_whole(options.docs / "markets.json", msgspec.json.format(msgspec.json.encode(raw), indent=1).decode() + "\n")
    print(table(rows))
    page = options.docs / "markets.md"
    if page.exists():
        write_whole(page, with_table(page.read_text(), f"{table(rows)}\n`{command}`, {today()}.\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
