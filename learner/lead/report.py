"""The metrics of a step, under the names that docs/metrics.md explains: sums and counts in, one record per step out."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.common.process.metrics import Metrics
from slipstream.common.records.trajectory import OUTCOME_OF, Outcome, StopReason, Trajectory
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.cost import Cost
from slipstream.learner.lead.tally import Tally
from slipstream.learner.model.flops import Flops
from slipstream.learner.objective.lag import BUCKETS, bucket_of
from slipstream.learner.publisher.publish import PublishStats
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.replay.fleet.fleet import Member
from slipstream.replay.records.ledger import Ledger

# What ends an episode of the policy's that the environment has not ended.
LIMITS = [reason for reason, outcome in OUTCOME_OF.items() if outcome is Outcome.POLICY and reason != StopReason.DONE]


def step_metrics(
    batch: Batch, step: StepMetrics, *, before: Progress, times_s: dict[str, float], flops: Flops, tally: Tally
) -> Metrics:
    """The metrics of one optimizer step, which are also added to `tally`; `before` is the progress before the step.

    `times_s` has the seconds of each part since the previous record.
    """
    metrics = Metrics()
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    _add_rewards(metrics, trajectories)
    _add_choices(metrics, batch)
    _add_lags(metrics, trajectories, before, tally)
    _add_step(metrics, step)
    for reason, count in batch.num_dropped.items():
        metrics.add(f"replay/dropped_{reason}", count)
    metrics.add("replay/dropped_reward", sum(batch.dropped_returns), len(batch.dropped_returns))
    metrics.add_histogram("trained/return", [trajectory.total_reward for trajectory in trajectories])
    metrics.add_histogram("trained/tokens", [float(trajectory.num_tokens) for trajectory in trajectories])
    for trajectory in trajectories:
        metrics.add("replay/consumed_tokens", trajectory.num_own_tokens)
        metrics.add("replay/consumed_turns", len(trajectory.own_turns))
        metrics.add("replay/consumed_s", trajectory.duration_s)
    _add_times(metrics, trajectories, step, times_s, flops, tally)
    return metrics


def add_produced(metrics: Metrics, before: Ledger, now: Ledger) -> None:
    """Add reward and success of every episode that ended since `before`, including those of dropped groups."""
    metrics.add("produced/episodes", max(0, now.inserted - before.inserted))
    num_new = sum(now.episodes.values()) - sum(before.episodes.get(env, 0) for env in now.episodes)
    for env, episodes in now.episodes.items():
        count = episodes - before.episodes.get(env, 0)
        successes = now.successes.get(env, 0) - before.successes.get(env, 0)
        returns = now.returns.get(env, 0.0) - before.returns.get(env, 0.0)
        if not 0 <= successes <= count:
            continue  # the server restarted with older data: the episodes since `before` are unknown
        metrics.add("produced/reward", returns, count)
        metrics.add("produced/success", successes, count)
        if len(now.episodes) > 1:
            metrics.add(f"produced/reward_in_{env}", returns, count)
            metrics.add(f"produced/success_in_{env}", successes, count)
            metrics.add(f"produced/share_of_{env}", count, num_new)


def add_flow(metrics: Metrics, batch: Batch, before: Ledger, now: Ledger) -> None:
    """Add the lengths of trajectories produced and dropped since `before`, and the fraction of tokens trained."""
    produced = now.inserted - before.inserted
    dropped = sum(now.dropped_trajectories.values()) - sum(before.dropped_trajectories.values())
    metrics.add("replay/produced_tokens", _produced(now.tokens) - _produced(before.tokens), produced)
    metrics.add("replay/produced_turns", _produced(now.turns) - _produced(before.turns), produced)
    metrics.add("replay/produced_s", (_produced(now.duration_ms) - _produced(before.duration_ms)) / 1000, produced)
    wasted = _dropped(now.tokens) - _dropped(before.tokens)
    metrics.add("replay/dropped_tokens", wasted, dropped)
    metrics.add("replay/dropped_turns", _dropped(now.turns) - _dropped(before.turns), dropped)
    metrics.add("replay/dropped_s", (_dropped(now.duration_ms) - _dropped(before.duration_ms)) / 1000, dropped)
    fresh = sum(t.num_own_tokens for group in batch.groups for t in group.trajectories if group.num_uses == 1)
    metrics.add("perf/goodput", fresh, fresh + wasted)


def add_fleet(metrics: Metrics, *, ledger: Ledger, actors: Sequence[Member]) -> None:
    """Add the state of the buffer and of the fleet."""
    metrics.add("replay/queued", ledger.queued)
    metrics.add("replay/leased", ledger.leased)
    metrics.add("replay/judging", ledger.judging)
    metrics.add("replay/ready", ledger.ready)
    metrics.add("replay/claimed", ledger.claimed)
    metrics.add("replay/quarantined", ledger.quarantined)
    metrics.add("replay/trained", ledger.trained)
    metrics.add("replay/expired_leases", ledger.expired_leases)
    metrics.add("replay/partials_handed_in", ledger.partials_handed_in)
    metrics.add("replay/total_failed", sum(ledger.failed.values()))
    for reason, count in ledger.dropped.items():
        metrics.add(f"replay/total_dropped_{reason}", count)
    for outcome, count in ledger.failed.items():
        metrics.add(f"replay/total_failed_{outcome}", count)
    metrics.add("fleet/num_actors", len(actors))
    metrics.add("fleet/num_spot_actors", sum(actor.instance_kind == "spot" for actor in actors))
    metrics.add("fleet/num_episodes", sum(actor.num_episodes for actor in actors))
    metrics.add("fleet/slots_used", slots_used(actors), min(len(actors), 1))
    metrics.add("fleet/generated_tokens_per_s", sum(actor.tokens_per_s for actor in actors))
    for actor in actors:
        metrics.add("fleet/kv_use", actor.kv_use)


def add_publishing(metrics: Metrics, *, actors: Iterable[Member], publish: PublishStats) -> None:
    """Add how weights travel."""
    for actor in actors:
        metrics.add("time/refresh_pause_s", actor.last_pause_s)
    metrics.add("time/publish_copy_s", publish.copy_s)
    metrics.add("time/broadcast_s", publish.broadcast_s)
    metrics.add("perf/publish_mb", publish.announced.num_bytes / 1e6)
    metrics.add("fleet/pulled_bytes", publish.announced.served_bytes)


def add_cost(metrics: Metrics, cost: Cost) -> None:
    """Add the cost of the actors so far, if they have prices, and the tokens that were wasted."""
    if cost.dollars_per_million_tokens is not None:
        metrics.add("fleet/cost_dollars", cost.dollars)
        metrics.add("fleet/dollars_per_hour", cost.dollars_per_hour)
        metrics.add("fleet/dollars_per_hour_of_spot", cost.spot_dollars_per_hour)
        metrics.add("fleet/dollars_per_hour_of_reserved", cost.dollars_per_hour - cost.spot_dollars_per_hour)
        metrics.add("fleet/dollars_per_million_tokens", cost.dollars_per_million_tokens)
    for reason, tokens in cost.wasted_tokens.items():
        metrics.add(f"fleet/wasted_tokens_{reason}", tokens)


def slots_used(actors: Sequence[Member]) -> float:
    """The fraction of the actors' slots that played an episode, over their last heartbeat; 0 without actors."""
    return sum(actor.used_slots for actor in actors) / max(sum(actor.max_episodes for actor in actors), 1)


def _produced(sums: dict[str, int]) -> int:
    return sums.get("produced", 0)


def _dropped(sums: dict[str, int]) -> int:
    return sum(total for account, total in sums.items() if account.startswith("dropped:"))


def _add_rewards(metrics: Metrics, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        metrics.add("trained/reward", trajectory.total_reward)
        metrics.add("trained/success", float(trajectory.success))
        metrics.add("trained/score", trajectory.score)
        metrics.add("trained/valid_actions", sum(t.valid_action for t in trajectory.turns), len(trajectory.turns))
        metrics.add("trained/branches", len(trajectory.branch_starts) - 1)
        for limit in LIMITS:
            metrics.add(f"trained/ended_by_{limit.value}", float(trajectory.stop_reason is limit))
        for turn in trajectory.turns:
            for component, reward in turn.rewards.items():
                metrics.add(f"trained/reward_of_{component}", reward, 0)
        metrics.add("trained/scoring_s", trajectory.scoring_s)
        for part, value in trajectory.part_values.items():
            metrics.add(f"trained/value_of_{part}", value)
    for component in {name for t in trajectories for turn in t.turns for name in turn.rewards}:
        # A mean over trajectories, not over turns.
        metrics.add(f"trained/reward_of_{component}", 0.0, len(trajectories))
    envs = Counter(trajectory.task.env for trajectory in trajectories)
    if len(envs) > 1:
        for trajectory in trajectories:
            metrics.add(f"trained/success_in_{trajectory.task.env}", float(trajectory.success))
        for env, count in envs.items():
            metrics.add(f"trained/share_of_{env}", count, len(trajectories))


def _add_lags(metrics: Metrics, trajectories: list[Trajectory], before: Progress, tally: Tally) -> None:
    lags = _lags(before, [trajectory.oldest_policy_version for trajectory in trajectories])
    newest_lags = _lags(before, [trajectory.newest_policy_version for trajectory in trajectories])
    for lag in lags:
        tally.lag[str(lag)] = tally.lag.get(str(lag), 0) + 1
    metrics.add("lag/mean", sum(lags), len(lags))
    metrics.add("lag/max", max(lags))
    metrics.add("lag/newest_mean", sum(newest_lags), len(newest_lags))
    metrics.add_histogram("lag/oldest_token", [float(lag) for lag in lags])
    metrics.add_histogram("lag/newest_token", [float(lag) for lag in newest_lags])
    for trajectory, lag in zip(trajectories, lags, strict=True):
        metrics.add(f"trained/reward_at_lag_{bucket_of(lag)}", trajectory.total_reward)
    counts = Counter(map(bucket_of, lags))
    for bucket in BUCKETS:
        metrics.add(f"lag/fraction_at_{bucket}", counts[bucket], len(lags))


def _lags(before: Progress, versions: list[int]) -> list[int]:
    return [int(lag) for lag in before.lags(np.array(versions, dtype=np.int32))]


def _add_choices(metrics: Metrics, batch: Batch) -> None:
    """Add how many turns share their state in the group, how diverse the states are, and the sizes of kept sets."""
    for group in batch.groups:
        states = Counter(turn.state_key for trajectory in group.trajectories for turn in trajectory.own_turns)
        num_shared = sum(count for state, count in states.items() if state and count > 1)
        metrics.add("learner/shared_state_fraction", num_shared, states.total())
        num_known = states.total() - states[""]
        if num_known:
            metrics.add("learner/distinct_state_fraction", len(states.keys() - {""}), num_known)
        for trajectory in group.trajectories:
            if group.ticket.num_trees:
                metrics.add("trained/forks", float(trajectory.fork is not None))
            metrics.add("trained/temperature", trajectory.sampling.temperature)
            if trajectory.kept is not None:
                counts = trajectory.kept.count_array()
                metrics.add("mismatch/kept_tokens", int(counts.sum()), int(np.count_nonzero(counts)))


def _add_step(metrics: Metrics, step: StepMetrics) -> None:
    metrics.add("mismatch/kl", step.mismatch_kl)
    metrics.add("mismatch/ratio_mean", step.ratio_mean)
    metrics.add("mismatch/ratio_std", step.ratio_std)
    metrics.add("mismatch/ratio_max", step.ratio_max)
    metrics.add("mismatch/effective_sample_size", step.effective_sample_size)
    metrics.add("mismatch/chi_square", step.chi_square)
    metrics.add_histogram("mismatch/ratio_of_trajectory", step.trajectory_ratios)
    metrics.add("optim/loss", step.loss)
    metrics.add("optim/entropy", step.entropy)
    metrics.add("optim/reference_kl", step.reference_kl)
    metrics.add("optim/grad_norm", step.grad_norm)
    metrics.add("optim/lr", step.lr)
    metrics.add("optim/skipped", float(step.skipped))
    metrics.add("optim/clip_fraction_high", step.clip_fraction_high)
    metrics.add("optim/clip_fraction_low", step.clip_fraction_low)
    metrics.add("optim/masked_fraction", step.masked_fraction)
    metrics.add("optim/masked_sequence_fraction", step.masked_sequence_fraction)
    metrics.add("optim/weighed_fraction", step.weighed_fraction)
    metrics.add("optim/weight_mean", step.evidence.weight_mean)
    metrics.add("optim/token_ess", step.evidence.token_ess)
    metrics.add("optim/trajectory_ess", step.evidence.trajectory_ess)
    metrics.add("optim/guard_scale", step.guard_scale)
    for bucket, tokens in step.by_lag.items():
        metrics.add(f"lag/tokens_at_{bucket}", tokens.fraction)
        metrics.add(f"mismatch/ratio_mean_at_lag_{bucket}", tokens.ratio_mean)
        metrics.add(f"mismatch/effective_sample_size_at_lag_{bucket}", tokens.effective_sample_size)
        metrics.add(f"optim/clip_fraction_at_lag_{bucket}", tokens.clip_fraction)
        metrics.add(f"optim/masked_fraction_at_lag_{bucket}", tokens.masked_fraction)
    metrics.add("learner/num_loss_tokens", step.num_loss_tokens)
    metrics.add("learner/num_micro_batches", step.num_micro_batches)
    if step.values is not None:
        metrics.add("learner/value_loss", step.values.loss)
        metrics.add("learner/value_explained_variance", step.values.explained_variance)
        metrics.add("learner/value_mean", step.values.mean)
        metrics.add("learner/value_return_mean", step.values.return_mean)
        metrics.add("learner/value_grad_norm", step.values.grad_norm)
        metrics.add("learner/value_lr", step.values.lr)


def _add_times(
    metrics: Metrics,
    trajectories: Sequence[Trajectory],
    step: StepMetrics,
    times_s: dict[str, float],
    flops: Flops,
    tally: Tally,
) -> None:
    num_tokens = sum(trajectory.num_own_tokens for trajectory in trajectories)
    elapsed_s = sum(times_s.values())
    tally.tokens_trained += num_tokens
    tally.seconds += elapsed_s
    metrics.add("perf/trained_tokens_per_s", num_tokens / elapsed_s)
    metrics.add("perf/learner_busy", 1 - times_s["wait"] / elapsed_s)
    metrics.add("perf/step_s", elapsed_s)
    metrics.add("learner/computed_fraction", step.num_computed_tokens / sum(t.num_tokens for t in trajectories))
    utilisation = flops.utilisation(step.num_computed_tokens, num_pairs=step.num_pairs, elapsed_s=elapsed_s)
    if utilisation is not None:
        metrics.add("perf/mfu", utilisation)
    for name, seconds in times_s.items():
        metrics.add(f"time/{name}_s", seconds)
