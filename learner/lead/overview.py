"""What TensorBoard shows of a run, where, what each chart says about itself, and which metrics are for debugging."""

import functools
import json
import re
from urllib.parse import urlencode

from slipstream.common.process.metrics import Place

LEARNER, FLEET = "learner", "fleet"

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

# Those that `FleetWatch` shows by the wall clock.
BY_THE_CLOCK = re.compile(
    r"fleet/(num_\w+|slots_used|generated_tokens_per_s|kv_use|cost_dollars|dollars_per_\w+|wasted_tokens_\w+)"
    r"|replay/(queued|leased|judging|ready|claimed|quarantined|trained|expired_leases|partials_\w+|total_\w+)"
)


# The other charts, each with what it shows; `*` is a name of the run's: of an environment, a part of the reward, a
# reason. The rest is under `rest/`, after them in the alphabet.
SHOWN = {
    "charts/turns": "Mean turns of an episode: finished, trained and dropped ones. Far apart: the choice of what to "
    "train on is biased by length.",
    "charts/seconds": "Mean wall clock of an episode, in seconds. It grows: environments or engines get slower.",
    "produced/episodes": "Training episodes that finished since the last step. 0: actors are stuck, or wait.",
    "produced/success_in_*": "Success of the finished episodes of one environment. All rise; one falls: more weight.",
    "produced/reward_in_*": "Mean return of the finished episodes of one environment.",
    "produced/share_of_*": "Share of one environment among the finished episodes. Healthy: its weight in the mixture.",
    "trained/valid_actions": "Share of the batch's actions that the environment could read. Healthy: above 0.9.",
    "trained/ended_by_*": "Share of the batch's episodes that a limit of the run ended. It falls.",
    "trained/reward_of_*": "Mean of one component of the reward in the batch. One rises and others fall: exploited.",
    "trained/value_of_*": "Mean of what a part of env.rewards measured in the batch, without its weight.",
    "eval/success_greedy": "Held-out tasks solved at temperature 0. Far below the sampled: greedy decoding loops.",
    "eval/success_low": "Lower end of the 95 % interval of held-out success, sampled.",
    "eval/success_high": "Upper end of the 95 % interval of held-out success, sampled.",
    "eval/success_sampled_in_*": "Held-out tasks of one environment solved, sampled. One falls: it is forgotten.",
    "eval/success_greedy_in_*": "Held-out tasks of one environment solved at temperature 0.",
    "lag/max": "Largest lag of a trajectory's oldest token, in optimizer steps. Healthy: at most replay.max_lag.",
    "mismatch/kl": "KL divergence of behaviour from current policy, nats a token. Healthy: around 0.001.",
    "mismatch/ratio_max": "Largest ratio of current to behaviour probability of a token. Healthy: below 10.",
    "mismatch/effective_sample_size": "(sum of ratios)^2 / sum of squares / tokens. Below 0.5: the data are too old.",
    "optim/loss": "The loss. Near 0 and noisy; alone it tells nothing about progress.",
    "optim/reference_kl": "KL divergence to the policy that RL began with, nats a token; 0 without a reference.",
    "optim/grad_norm": "Norm of the gradient before clipping. Healthy: steady.",
    "optim/lr": "Learning rate, with the guard's scale. 0: the guard refused the step.",
    "optim/skipped": "1: nothing was updated, as the gradient was not finite or the guard refused it.",
    "optim/clip_fraction_high": "Share of the tokens that were clipped, of positive advantage. Healthy: a few %.",
    "optim/clip_fraction_low": "Share of the tokens that were clipped, of negative advantage. Healthy: a few %.",
    "optim/masked_fraction": "Share of the tokens that correction or replay.max_lag left out. Healthy: below 1 %.",
    "replay/queued": "Groups that wait for an actor. 0 for long: actors wait; raise replay.target_lag.",
    "replay/leased": "Groups that are being played.",
    "replay/judging": "Complete groups that wait for their judge.",
    "replay/ready": "Finished groups that wait for the learner. At the cap: actors wait for the learner.",
    "replay/claimed": "Groups that were trained on, and that no durable checkpoint covers yet.",
    "replay/quarantined": "Groups that were set aside: `slipstream replay quarantined`. Healthy: 0.",
    "replay/trained": "Groups trained and covered by a checkpoint so far. It rises with checkpoints.",
    "replay/expired_leases": "Leases lost so far: actors died, or were stuck. Healthy: 0.",
    "replay/partials_handed_in": "Parts of episodes that preempted actors handed in so far.",
    "replay/total_dropped_*": "Groups dropped so far, for this reason.",
    "replay/total_failed_*": "Attempts that failed so far in this way, and were played again.",
    "fleet/num_spot_actors": "Actors on spot instances. It falls: they were preempted.",
    "fleet/num_episodes": "Episodes being played. Healthy: actors.max_episodes for each actor.",
    "fleet/slots_used": "Slots that played an episode between two heartbeats, as a fraction of all. Healthy: near 1.",
    "fleet/advised_actors": "Actors that the run can use. More than there are: the learner waits.",
    "fleet/generated_tokens_per_s": "Tokens a second that all engines sample. 0: actors wait for environments.",
    "fleet/kv_use": "KV cache in use, mean over actors. Above 0.9: no new groups begin.",
    "fleet/cost_dollars": "Dollars that the actors have cost so far; only with actors.price_per_hour.",
    "fleet/dollars_per_hour": "Dollars an hour of the actors that serve now, spot and reserved.",
    "fleet/dollars_per_hour_of_spot": "Dollars an hour of the spot instances among them.",
    "fleet/dollars_per_hour_of_reserved": "Dollars an hour of the reserved instances among them.",
    "fleet/wasted_tokens_*": "Tokens so far that were not trained on, for this reason.",
    "perf/step_s": "Seconds from one step's record to the next.",
    "perf/trained_tokens_per_s": "Tokens a second that the learner trains on, prompts included.",
    "perf/mfu": "Share of the devices' peak flops that the step used on computed tokens. Healthy: above 0.3.",
    "perf/goodput": "Share of the tokens that are trained and not dropped. Healthy: above 0.7.",
    "time/wait_s": "Seconds of a step in which the learner waited for actors.",
    "time/forward_s": "Seconds of forward passes and loss in a step.",
    "time/backward_s": "Seconds of backward passes in a step.",
    "time/optimizer_s": "Seconds of sums over the ranks, clipping and update in a step.",
    "time/publish_s": "Seconds of a step in which the weights were copied out, with what must be gathered for that.",
    "time/checkpoint_s": "Seconds of the checkpoint before this record.",
}

# What has no description in TensorBoard: histograms, and texts.
UNDESCRIBED = re.compile(r"trained/(return|tokens|best|worst|random)|lag/oldest_token|mismatch/ratio_of_trajectory")


@functools.cache
def describe(tag: str) -> str:
    """The description of a chart; charts for debugging have that of docs/metrics.md alone."""
    if tag in PINNED:
        return PINNED[tag]
    if tag.startswith("rest/"):
        return "docs/metrics.md explains it."
    return next((text for name, text in SHOWN.items() if re.fullmatch(name.replace("*", r"\w+"), tag)), "")


def place_of(name: str) -> Place | None:
    """Where TensorBoard shows the metric of a step; None if it is shown by the clock."""
    if name in LINES:
        return LINES[name]
    if BY_THE_CLOCK.fullmatch(name):
        return None
    return Place(LEARNER, name if describe(name) or UNDESCRIBED.fullmatch(name) else f"rest/{name}")


def pinned_link(address: str) -> str:
    """The link that opens the TensorBoard at `address` with the charts of PINNED on top; those without data are absent.

    TensorBoard reads `pinnedCards` from the query when its page loads.
    """
    cards = [{"plugin": "scalars", "tag": tag} for tag in PINNED]
    return f"{address}/?{urlencode({'pinnedCards': json.dumps(cards, separators=(',', ':'))})}#timeseries"
