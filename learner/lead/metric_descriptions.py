"""What each chart of TensorBoard says about itself: its question in the overview, else what it shows."""

import functools
import re

from slipstream.learner.lead.overview import PINNED

# By tag; `*` is a name of the run's: of an environment, a part of the reward, a reason.
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


@functools.cache
def describe(tag: str) -> str:
    """The description of a chart; charts for debugging have that of docs/metrics.md alone."""
    if tag in PINNED:
        return PINNED[tag]
    if tag.startswith("rest/"):
        return "docs/metrics.md explains it."
    found = [text for name, text in SHOWN.items() if re.fullmatch(name.replace("*", r"\w+"), tag)]
    return SHOWN.get(tag) or (found[0] if found else "")
