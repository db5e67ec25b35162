"""What a step measured, by the names that people watch. Sums and counts in, one record a step out."""

from collections.abc import Iterable

from common.metrics import Metrics
from common.trajectory import Trajectory
from learner.publish import PublishStats
from learner.step import StepMetrics
from learner.supply import Batch
from learner.tally import Tally
from replay.fleet import Member
from replay.ledger import Ledger


def step_metrics(
    batch: Batch, step: StepMetrics, *, policy_version: int, times_s: dict[str, float], tally: Tally
) -> Metrics:
    """Everything about one optimizer step, also added to `tally`; `policy_version` is the one that was trained."""
    metrics = Metrics()
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    _add_rewards(metrics, trajectories)
    lags = [policy_version - trajectory.oldest_policy_version for trajectory in trajectories]
    tally.add_lags(lags)
    metrics.add("lag/mean", sum(lags), len(lags))
    metrics.add("lag/max", max(lags))
    metrics.add_histogram("lag/oldest_token", [float(lag) for lag in lags])
    metrics.add(
        "lag/newest_token", sum(policy_version - t.newest_policy_version for t in trajectories), len(trajectories)
    )
    _add_step(metrics, step)
    for reason, count in batch.num_dropped.items():
        metrics.add(f"replay/dropped_{reason}", count)
    num_tokens = sum(trajectory.num_tokens for trajectory in trajectories)
    elapsed_s = sum(times_s.values())
    tally.tokens_trained += num_tokens
    tally.seconds += elapsed_s
    metrics.add("perf/trained_tokens_per_s", num_tokens / elapsed_s)
    metrics.add("perf/learner_busy", 1 - times_s["wait"] / elapsed_s)
    for name, seconds in times_s.items():
        metrics.add(f"time/{name}_s", seconds)
    return metrics


def add_system(metrics: Metrics, *, ledger: Ledger, members: Iterable[Member], publish: PublishStats) -> None:
    """What the buffer, the fleet and the publisher say about themselves."""
    for name in ("queued", "leased", "ready", "claimed", "quarantined", "trained"):
        metrics.add(f"replay/{name}", getattr(ledger, name))
    for reason, count in ledger.dropped.items():
        metrics.add(f"replay/total_dropped_{reason}", count)
    actors = [member for member in members if member.role == "actor"]
    metrics.add("fleet/num_actors", len(actors))
    metrics.add("fleet/num_episodes", sum(actor.num_episodes for actor in actors))
    metrics.add("fleet/generated_tokens_per_s", sum(actor.tokens_per_s for actor in actors))
    for actor in actors:
        metrics.add("fleet/kv_use", actor.kv_use)
        metrics.add("time/refresh_pause_s", actor.last_pause_s)
    metrics.add("time/publish_copy_s", publish.copy_s)
    metrics.add("time/broadcast_s", publish.broadcast_s)


def _add_rewards(metrics: Metrics, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        metrics.add("reward/mean", trajectory.total_reward)
        metrics.add("reward/success", float(trajectory.success))
        metrics.add("reward/score", trajectory.score)
        metrics.add("reward/turns", len(trajectory.turns))
        metrics.add("reward/tokens", trajectory.num_tokens)
        metrics.add("reward/valid_actions", sum(t.valid_action for t in trajectory.turns), len(trajectory.turns))
        metrics.add("reward/branches", len(trajectory.branch_starts) - 1)
        for turn in trajectory.turns:
            for component, reward in turn.rewards.items():
                metrics.add(f"reward/{component}", reward, 0)
    for component in {name for t in trajectories for turn in t.turns for name in turn.rewards}:
        metrics.add(f"reward/{component}", 0.0, len(trajectories))  # a mean over trajectories, not over turns


def _add_step(metrics: Metrics, step: StepMetrics) -> None:
    metrics.add("mismatch/kl", step.mismatch_kl)
    metrics.add("mismatch/ratio_mean", step.ratio_mean)
    metrics.add("mismatch/ratio_std", step.ratio_std)
    metrics.add("mismatch/ratio_max", step.ratio_max)
    metrics.add("mismatch/effective_sample_size", step.effective_sample_size)
    metrics.add("mismatch/chi_square", step.chi_square)
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
    metrics.add("optim/truncated_fraction", step.truncated_fraction)
    metrics.add("optim/guard_scale", step.guard_scale)
    metrics.add("learner/num_loss_tokens", step.num_loss_tokens)
    metrics.add("learner/num_micro_batches", step.num_micro_batches)
    if step.values is not None:
        metrics.add("learner/value_loss", step.values.loss)
        metrics.add("learner/value_clip_fraction", step.values.clip_fraction)
        metrics.add("learner/value_explained_variance", step.values.explained_variance)
        metrics.add("learner/value_mean", step.values.mean)
        metrics.add("learner/value_return_mean", step.values.return_mean)
        metrics.add("learner/value_grad_norm", step.values.grad_norm)
        metrics.add("learner/value_lr", step.values.lr)
