"""`slipstream simulate`: what another fleet, or other settings, would give, by a simulation calibrated on a run."""

import statistics

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import require
from slipstream.tools.simulate.calibration import Calibration, calibrate
from slipstream.tools.simulate.outcome import Outcome
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.simulated_run import Plan
from slipstream.tools.simulate.simulated_world import World
from slipstream.tools.terminal.table import print_rows

MANY_REQUESTS_PER_S = 30_000  # a server takes about 32 us for each: docs/benchmarks.md
BUSY, IDLE, FULL = 0.9, 0.7, 0.9
NUM_STEPS = 100  # optimizer steps that are measured
RESTART_S = 120.0  # until a lost actor is replaced: a new spot instance boots and loads its model
COLUMNS = ("actors", "steps/h", "episodes/s", "lag", "masked", "busy", "slots", "wasted", "$/h", "$/step", "limit")


def simulate(config: Config, *, options: SimulateOptions) -> int:
    """Print a row for each fleet, after one that repeats the run itself; return 0. Raises ConfigError.

    `config` is that of the run, with the changes to be tried.
    """
    facts = calibrate(config)
    require(
        not config.replay.num_trees,
        "replay.num_trees",
        "0 in a simulation",
        config.replay.num_trees,
        "groups are simulated with all their members at once",
    )
    counts = [int(number) for number in options.actors] or [facts.num_actors]
    plans = [plan_of(config, options, facts, num_actors=count) for count in counts]
    outcomes = [World(plan, facts).run() for plan in plans]
    print(_measured(config, facts))
    print_rows(COLUMNS, [_row(plan, outcome) for plan, outcome in zip(plans, outcomes, strict=True)])
    return 0


def plan_of(config: Config, options: SimulateOptions, facts: Calibration, *, num_actors: int) -> Plan:
    """The plan for a fleet of `num_actors`, with the settings of `config`. Raises ConfigError."""
    replay = config.replay
    require(
        replay.group_size == facts.group_size or facts.useful_share == 1,
        "replay.group_size",
        f"{facts.group_size}, as in the run",
        replay.group_size,
        f"{1 - facts.useful_share:.0%} of the run's groups had equal returns; of another size that share is not known",
    )
    return Plan(
        num_actors=num_actors,
        max_episodes=config.actors.max_episodes,
        group_size=replay.group_size,
        groups_per_step=replay.groups_per_step,
        step_scale=replay.groups_per_step / facts.groups_per_step / options.learner_speed,
        num_shards=config.redis.num_shards,
        target_lag=replay.target_lag,
        max_lag=replay.max_lag,
        steps=NUM_STEPS,
        price_per_hour=config.actors.price_per_hour,
        preemptions_per_hour=options.preemptions_per_hour,
        restart_s=RESTART_S,
        seed=config.run.seed,
    )


def limit_of(plan: Plan, outcome: Outcome) -> str:
    """What limits the run, and the setting that changes it."""
    if outcome.requests_per_s > MANY_REQUESTS_PER_S:
        return f"Redis, at {outcome.requests_per_s:,.0f} requests/s; use redis.shards"
    if outcome.learner_busy > BUSY:
        return "the learner; use more learner.ranks, or fewer actors"
    if outcome.slots_used > FULL:
        return "actors; add some"
    if outcome.slots_used < IDLE:
        return "admission; raise replay.target_lag or groups_per_step, or use fewer actors"
    return "none alone"


def _measured(config: Config, facts: Calibration) -> str:
    fixed, per_request = 1000 * facts.token_time.fixed_s, 1000 * facts.token_time.per_request_s
    return (
        f"calibrated on {len(facts.episodes)} episodes of {config.run.name}: {facts.num_actors} actors, "
        f"{facts.steps_per_hour:.0f} steps/h, lag {facts.lag:.2f}; a turn takes {1000 * facts.turn_s:.0f} ms until its "
        f"first token, a token {fixed:.1f} ms + {per_request:.2f} ms for each request, a step "
        f"{statistics.fmean(facts.step_s):.2f} s, a refresh {facts.refresh_s:.2f} s; {facts.useful_share:.0%} of the "
        "groups teach"
    )


def _row(plan: Plan, outcome: Outcome) -> list[str]:
    dollars = outcome.dollars_per_hour
    return [
        str(plan.num_actors),
        f"{outcome.steps_per_hour:.0f}",
        f"{outcome.episodes_per_s:.1f}",
        f"{outcome.lag:.2f}",
        f"{outcome.masked_share:.1%}",
        f"{outcome.learner_busy:.0%}",
        f"{outcome.slots_used:.0%}",
        f"{outcome.wasted_share:.0%}",
        f"{dollars:.2f}" if dollars else "",
        f"{dollars / outcome.steps_per_hour:.4f}" if dollars else "",
        limit_of(plan, outcome),
    ]
