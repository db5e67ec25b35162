"""`slipstream simulate`: what another fleet, or other settings, would give, by a simulation calibrated on a run."""

import statistics

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import require
from slipstream.tools.simulate.calibration import Calibration, calibrate
from slipstream.tools.simulate.outcome import Outcome
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.simulate.simulated_world import World
from slipstream.tools.terminal.table import print_rows

BUSY, IDLE, FULL = 0.9, 0.7, 0.9
COLUMNS = ("actors", "steps/h", "tokens/s", "lag", "99%", "masked", "busy", "slots", "wasted", "$/h", "$/step", "limit")


def simulate(config: Config, *, options: SimulateOptions) -> int:
    """Print a row for each fleet, beside the errors of simulating the run itself; return 0. Raises ConfigError.

    `config` is that of the run, with the changes to be tried.
    """
    facts = calibrate(config)
    trees, cure = config.replay.trees, "groups are simulated with all their members at once"
    require(not trees, "replay.trees", "empty in a simulation", trees, cure)
    recorded = facts.config.replay
    require(
        config.replay.group_size == recorded.group_size or facts.useful_share == 1,
        "replay.group_size",
        f"{recorded.group_size}, as in the run",
        config.replay.group_size,
        f"{1 - facts.useful_share:.0%} of the run's groups had equal returns; of another size that share is not known",
    )
    again = World(facts.config, facts, num_actors=facts.num_actors).run()
    print(_measured(facts))
    rows = []
    for num_actors in [int(number) for number in options.actors] or [facts.num_actors]:
        outcome = World(config, facts, num_actors=num_actors, options=options).run()
        limit = limit_of(outcome, facts, num_actors=num_actors)
        rows.append([str(num_actors), *_row(outcome, again, facts), limit])
    print_rows(COLUMNS, rows)
    return 0


def limit_of(outcome: Outcome, facts: Calibration, *, num_actors: int) -> str:
    """What limits the run, and the setting that changes it."""
    if 0 < facts.num_cores < num_actors + outcome.learner_busy:
        return f"the {facts.num_cores} cores that learner and engines share; use other hosts"
    if outcome.learner_busy > BUSY:
        return "the learner; use more learner.ranks, or fewer actors"
    if outcome.slots_used > FULL:
        return "actors; add some"
    if outcome.slots_used < IDLE:
        return "admission; raise replay.target_lag or groups_per_step, or use fewer actors"
    return "none alone"


def _measured(facts: Calibration) -> str:
    fixed, per_request = 1000 * facts.token_time.fixed_s, 1000 * facts.token_time.per_request_s
    step_s = statistics.fmean(step.of(1.0) for step in facts.step_times)
    cores = f" on the {facts.num_cores} cores that they share" if facts.num_cores else ""
    return (
        f"calibrated on {len(facts.groups)} groups of {facts.config.run.name}: {facts.num_actors} actors, "
        f"{facts.steps_per_hour:.0f} steps/h, {facts.tokens_per_s:.0f} tokens/s, lag {facts.lag:.2f}; a turn begins "
        f"after {facts.first_tokens:.1f} tokens, of {fixed:.1f} ms + {per_request:.2f} ms for each request, a step "
        f"takes {step_s:.2f} s, a refresh {facts.refresh_s:.2f} s{cores}; {facts.useful_share:.0%} of the groups "
        "teach\nbeside each prediction: the error of a simulation of that run itself"
    )


def _row(outcome: Outcome, again: Outcome, facts: Calibration) -> list[str]:
    """The numbers of one fleet; `again` is the simulation of the run itself."""
    dollars = outcome.dollars_per_hour
    return [
        f"{outcome.steps_per_hour:.0f} {again.steps_per_hour / facts.steps_per_hour - 1:+.1%}",
        f"{outcome.tokens_per_s:.0f} {again.tokens_per_s / facts.tokens_per_s - 1:+.1%}",
        f"{outcome.lag:.2f} {again.lag - facts.lag:+.2f}",
        str(outcome.slow_lag),
        f"{outcome.masked_share:.1%}",
        f"{outcome.learner_busy:.0%}",
        f"{outcome.slots_used:.0%}",
        f"{outcome.wasted_share:.0%}",
        f"{dollars:.2f}" if dollars else "",
        f"{dollars / outcome.steps_per_hour:.4f}" if dollars else "",
    ]
