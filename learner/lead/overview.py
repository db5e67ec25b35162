"""What TensorBoard shows of a run, and where: the charts of the overview, and which metrics are for debugging."""

import dataclasses
import json
import re
from urllib.parse import urlencode

from slipstream.common.config.config import Config
from slipstream.common.process.metrics import Place

LEARNER, FLEET = "learner", "fleet"

# What the tab "HParams" compares runs by: the lines of charts below.
COMPARED = (("produced", "charts/success"), ("held_out", "charts/success"), ("produced", "charts/reward"))

# Metric -> its line in a chart of several, which bears the line's name in a colour of its own. TensorBoard shows groups
# in the order of the alphabet: `charts` is the first one.
LINES = {
    "produced/success": Place("produced", "charts/success"),
    "trained/success": Place("trained", "charts/success"),
    "eval/success_sampled": Place("held_out", "charts/success"),
    "produced/reward": Place("produced", "charts/reward"),
    "trained/reward": Place("trained", "charts/reward"),
    "replay/dropped_reward": Place("dropped", "charts/reward"),
    "replay/produced_tokens": Place("produced", "charts/tokens"),
    "replay/consumed_tokens": Place("trained", "charts/tokens"),
    "replay/dropped_tokens": Place("dropped", "charts/tokens"),
    "replay/produced_turns": Place("produced", "charts/turns"),
    "replay/consumed_turns": Place("trained", "charts/turns"),
    "replay/dropped_turns": Place("dropped", "charts/turns"),
    "replay/produced_s": Place("produced", "charts/seconds"),
    "replay/consumed_s": Place("trained", "charts/seconds"),
    "replay/dropped_s": Place("dropped", "charts/seconds"),
}

# The charts of the overview in their order, each with the question that it answers, which TensorBoard shows beside it.
PINNED = {
    "charts/success": "Is it learning? Success of all training episodes that finished since the last step "
    "(produced), and of tasks that it never trains on (held_out). Both rise. Flat with `optim/entropy` near 0: the "
    "policy collapsed. held_out falls behind: train tasks are memorised. trained is no measure of progress: groups "
    "with equal returns are dropped.",
    "charts/reward": "Is it learning what you want? Mean return of finished episodes. It rises and success does "
    "not: the policy exploits the reward. dropped: groups that the learner left out; far above or below trained: the "
    "batch is not what the policy does.",
    "charts/tokens": "Are episodes longer? Mean length. It rises with the reward and without success: the reward "
    "pays for length. dropped far above trained: the policy unlearns long tasks.",
    "optim/entropy": "Does it still explore? Nats a token. It declines slowly; at 0 it learns nothing more.",
    "lag/mean": "How stale is the data? Optimizer steps from a trajectory's oldest token to its training. Near "
    "`replay.target_lag`; above, episodes last longer than that many steps, or actors have old weights.",
    "perf/learner_busy": "Which side waits? Near 1: actors wait for the learner. Near 0: the learner waits for "
    "actors, whose environments may be slow.",
    "fleet/dollars_per_million_tokens": "What does it cost? Dollars for a million trained tokens; only with "
    "`actors.price_per_hour`. By seconds since the run began.",
    "fleet/num_actors": "Is anything failing? Actors that are alive: as many as were started. By seconds since the "
    "run began, so that it also moves while the learner waits.",
    "replay/total_failed": "Is anything failing? Attempts that failed so far without the policy's fault, and were "
    "played again. Flat; it rises: read `slipstream replay failures`. By seconds since the run began.",
}

# The other metrics that are shown under their own names; the rest is under `rest/`, after them in the alphabet.
SHOWN = re.compile(
    r"eval/success_(greedy|\w+_in_\w+|low|high)|produced/(episodes|(success|reward|share)_\w+)"
    r"|trained/(valid_actions|ended_by_\w+|reward_of_\w+|value_of_\w+|return|tokens|best|worst|random)"
    r"|lag/(max|oldest_token)|mismatch/(kl|effective_sample_size|ratio_max|ratio_of_trajectory)"
    r"|optim/(loss|grad_norm|lr|skipped|reference_kl|clip_fraction_(high|low)|masked_fraction)"
    r"|perf/(step_s|goodput|mfu|trained_tokens_per_s)"
    r"|time/(wait|forward|backward|optimizer|publish|checkpoint)_s|fleet/advised_actors"
)
# Those that `FleetWatch` shows by the wall clock.
BY_THE_CLOCK = re.compile(
    r"fleet/(num_\w+|slots_used|generated_tokens_per_s|kv_use|cost_dollars|dollars_per_\w+|wasted_tokens_\w+)"
    r"|replay/(queued|leased|judging|ready|claimed|quarantined|trained|expired_leases|partials_\w+|total_\w+)"
)


def place_of(name: str) -> Place | None:
    """Where TensorBoard shows the metric of a step; None if it is shown by the clock."""
    if name in LINES:
        return LINES[name]
    if BY_THE_CLOCK.fullmatch(name):
        return None
    return Place(LEARNER, name if name in PINNED or SHOWN.fullmatch(name) else f"rest/{name}")


def settings_of(config: Config) -> dict[str, str | float | bool]:
    """The settings by which runs are compared in the tab "HParams": the same names for every run."""
    values = dataclasses.asdict(config)
    return {
        f"{section}.{name}": value
        for section in ("env", "sampling", "replay", "objective", "optim")
        for name, value in values[section].items()
        if isinstance(value, str | int | float | bool)
    }


def pinned_link(address: str) -> str:
    """The link that opens the TensorBoard at `address` with the charts of PINNED on top; those without data are absent.

    TensorBoard reads `pinnedCards` from the query when its page loads.
    """
    cards = [{"plugin": "scalars", "tag": tag} for tag in PINNED]
    return f"{address}/?{urlencode({'pinnedCards': json.dumps(cards, separators=(',', ':'))})}#timeseries"
