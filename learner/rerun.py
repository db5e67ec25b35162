"""Trains again on the archived batches of a run, without actors and without Redis.

    archived step -> advantages -> packs -> one optimizer step -> checkpoint

On the same machine, with as many ranks, the weights equal the run's bit for bit. With other settings,
another model is trained on the same data. There are no actors, so nothing is published or evaluated.
"""

import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import MetricsWriter
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import MAX_TRAJECTORY_BYTES
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.conditions import THREADS, conditions_of, differences
from slipstream.learner.credit.tree import why_not_trained
from slipstream.learner.lead.follower import Follower
from slipstream.learner.lead.overview import describe, place_of
from slipstream.learner.lead.report import step_metrics
from slipstream.learner.lead.tally import load_tally, save_tally
from slipstream.learner.learner import (
    Learner,
    begin,
    begin_checkpoint,
    export,
    imitate_expert,
    load_learner,
    scored,
    stop_requested,
    train_on,
)
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.replay.run.archive import Archive, ArchiveError

MAX_THREADS = 1024

log = logging.getLogger(__name__)


def train_again(
    config: Config, run_dir: RunDir, archive: Archive, demonstrations: Path, *, ranks: Ranks, shutdown: Shutdown
) -> bool:
    """Train on every archived step up to `learner.steps`, then export; False if a stop was requested before the end.

    Every rank calls it, on one file system. Raises ArchiveError; if a step is missing, before training begins.
    """
    _use_as_many_threads(archive)
    resolve_dtype(config.model, ranks.device)
    differing = condition_differences(archive, config, ranks=ranks)
    for line in differing if ranks.rank == 0 else []:
        log.warning("the weights may differ from those of the run: %s", line)
    learner = load_learner(config, run_dir, ranks)
    lead: _Lead | Follower = _Lead(learner) if ranks.rank == 0 else Follower()
    try:
        warms_up = config.warm_start.episodes > 0 and not learner.has_checkpoint
        if warms_up and imitate_expert(learner, demonstrations, shutdown) is None:
            return False
        begin(learner)
        if not learner.has_checkpoint:
            begin_checkpoint(learner)
        finished = _make_steps(learner, archive, lead, shutdown)
        learner.checkpoints.wait()
    finally:
        learner.checkpoints.close()
        lead.close()
    if finished:
        export(learner)
    return finished


def _use_as_many_threads(archive: Archive) -> None:
    """Compute with the threads of the run's first step: sums in another order have other last bits."""
    num_threads = archive.conditions(1).get(THREADS, "")
    if num_threads.isdecimal() and 1 <= int(num_threads) <= MAX_THREADS:
        torch.set_num_threads(int(num_threads))


def catch_up(learner: Learner, *, durable_step: int) -> None:
    """Make the steps up to `durable_step` again from the run's archive, because their checkpoint is lost.

    Their groups count as trained, so only the archive still has them. Every rank calls it. Raises ConfigError if the
    archive lacks a step.
    """
    begun = learner.progress.step
    archive = Archive(learner.run_dir.trajectories, learner.config.run.name)
    log.error(
        "the checkpoint of step %d is lost: making steps %d to %d again from the archive",
        durable_step,
        begun + 1,
        durable_step,
    )
    begin(learner)
    clock = Clock(learner.ranks.device)
    try:
        while learner.progress.step < durable_step:
            _step(learner, archive, Follower(), clock)  # the run has recorded these steps
    except ArchiveError as error:
        raise ConfigError(
            f"the checkpoint of step {durable_step} is lost, the newest intact one is of step {begun}, and the archive "
            f"of the steps between cannot be read: {error}; restore the checkpoint or the file from a copy, or start a "
            "new run"
        ) from error


def condition_differences(archive: Archive, config: Config, *, ranks: Ranks) -> list[str]:
    """One line of text for each difference in settings or machine between the run's steps and this re-run.

    Raises ArchiveError if a step is missing.
    """
    ours = conditions_of(config, ranks=ranks)
    theirs = [(step, archive.conditions(step)) for step in range(1, min(config.learner.steps, archive.last_step) + 1)]
    found = []
    for conditions, alike in itertools.groupby(theirs, key=lambda item: item[1]):
        steps = [step for step, _ in alike]
        found += [f"steps {steps[0]} to {steps[-1]}: {line}" for line in differences(conditions, ours)]
    return found


def _make_steps(learner: Learner, archive: Archive, lead: "_Lead | Follower", shutdown: Shutdown) -> bool:
    """Train on every step; False if a stop was requested, after writing a checkpoint."""
    last, stopping = min(learner.config.learner.steps, archive.last_step), False
    clock = Clock(learner.ranks.device)
    while learner.progress.step < last and not stopping:
        _step(learner, archive, lead, clock)
        step = learner.progress.step
        stopping = stop_requested(shutdown, learner.ranks)
        if stopping or step % learner.config.learner.checkpoint_every == 0 or step == last:
            begin_checkpoint(learner, lead.prepare_checkpoint(learner.progress))
        clock.lap("checkpoint")
    return learner.progress.step >= last


def _step(learner: Learner, archive: Archive, lead: "_Lead | Follower", clock: Clock) -> None:
    learner.checkpoints.raise_failure()
    archived = archive.read(
        learner.progress.step + 1,
        vocab_size=learner.model.vocab_size,
        max_group_bytes=learner.config.replay.group_size * MAX_TRAJECTORY_BYTES,
    )
    for group in archived.groups:
        if why := why_not_trained(group.trajectories, learner.config.objective):
            raise ConfigError(
                f"step {archived.step} of the archive cannot be trained with this objective: group "
                f"{group.ticket.group_id}: {why}"
            )
    clock.lap("wait")
    # The run's version numbers, which skip some numbers at each resumption.
    before = msgspec.structs.replace(
        learner.progress, policy_version=archived.policy_version, resumptions=archived.resumptions
    )
    learner.progress = before
    newest = max(group.ticket.group_id for group in archived.groups)
    batch = Batch(groups=archived.groups, num_dropped={}, next_group_id=max(before.next_group_id, newest + 1))
    batch = scored(learner, batch)
    metrics = train_on(learner, batch, clock)
    lead.record_step(batch, metrics, before, clock.take())
    clock.lap("record")


class _Lead:
    """Rank 0's duties in a re-run: it writes the metrics and the tally."""

    def __init__(self, learner: Learner) -> None:
        run_dir, step = learner.run_dir, learner.progress.step
        self._flops = learner.flops
        self._tally_path = run_dir.tally
        self._tally = load_tally(run_dir.tally)
        self._writer = MetricsWriter(
            run_dir, resume_step=step, place=place_of, describe=describe, check=learner.checkpoints.fence.check
        )

    def record_step(self, batch: Batch, step: StepMetrics, before: Progress, times_s: dict[str, float]) -> None:
        """Write the metrics of the step that followed `before`, and log one line."""
        metrics = step_metrics(batch, step, before=before, times_s=times_s, flops=self._flops, tally=self._tally)
        means = self._writer.write(before.step + 1, metrics)
        log.info(
            "step %d: mean reward of the batch %.3f, took %.1f s",
            before.step + 1,
            means["trained/reward"],
            sum(times_s.values()),
        )

    def prepare_checkpoint(self, _: Progress) -> Callable[[], None]:
        """A function that saves the tally as of now; any thread may call it once a checkpoint covers these steps."""
        return partial(save_tally, copy.deepcopy(self._tally), self._tally_path)

    def close(self) -> None:
        self._writer.close()
