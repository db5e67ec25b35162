"""The learner once more, without actors and without Redis: batches from a run's archive, and the same weights again.

    archived step -> advantages -> packs -> one optimizer step -> checkpoint

On the same machine, with as many ranks and threads, the weights are the run's bit for bit; with other settings another
model is trained on the same data. Nobody is there to sample: nothing is published, and nothing is evaluated.
"""

import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from common.config import Config
from common.metrics import MetricsWriter
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner.checkpoint import Progress
from learner.clock import Clock
from learner.conditions import conditions_of, differences
from learner.learner import (
    Learner,
    any_rank_is_told,
    begin,
    begin_checkpoint,
    export,
    imitate_expert,
    judged,
    load_learner,
    train_on,
)
from learner.overview import OVERVIEW
from learner.ranks import Ranks
from learner.report import step_metrics
from learner.step_metrics import StepMetrics
from learner.supply import Batch
from learner.tally import load_tally, save_tally
from replay.archive import Archive

log = logging.getLogger(__name__)


def train_again(
    config: Config, run_dir: RunDir, archive: Archive, demonstrations: Path, *, ranks: Ranks, shutdown: Shutdown
) -> bool:
    """Train on every archived step up to `learner.steps` and export the model; False when told to stop before that.

    Every rank calls it, on one file system. Raises ArchiveError; for a step that is missing, before any is made.
    """
    otherwise = made_otherwise(archive, config, ranks=ranks)
    for line in otherwise if ranks.rank == 0 else []:
        log.warning("weights may differ from the run's: %s", line)
    learner, resumed = load_learner(config, run_dir, ranks)
    notes = _Notes(learner) if ranks.rank == 0 else None
    try:
        if not resumed and config.warm_start.episodes and imitate_expert(learner, demonstrations, shutdown) is None:
            return False
        begin(learner)
        if not resumed:
            begin_checkpoint(learner)
        finished = _make_steps(learner, archive, notes, shutdown)
        learner.checkpoints.wait()
    finally:
        learner.checkpoints.close()
        if notes:
            notes.close()
    if finished:
        export(learner)
    return finished


def last_step(archive: Archive, config: Config) -> int:
    """Of a re-run: the archive's last, or `learner.steps` where that is less."""
    return min(config.learner.steps, archive.last_step)


def made_otherwise(archive: Archive, config: Config, *, ranks: Ranks) -> list[str]:
    """Where the run's steps were made with other settings, or on another machine, than this re-run's; for people.

    Raises ArchiveError where a step is missing.
    """
    ours = conditions_of(config, ranks=ranks)
    theirs = [(step, archive.conditions(step)) for step in range(1, last_step(archive, config) + 1)]
    found = []
    for conditions, alike in itertools.groupby(theirs, key=lambda item: item[1]):
        steps = [step for step, _ in alike]
        found += [f"steps {steps[0]} to {steps[-1]}: {line}" for line in differences(conditions, ours)]
    return found


def _make_steps(learner: Learner, archive: Archive, notes: "_Notes | None", shutdown: Shutdown) -> bool:
    """False when told to stop; a checkpoint was written first."""
    last, told = last_step(archive, learner.config), False
    clock = Clock(learner.ranks.device)
    while learner.progress.step < last and not told:
        _step(learner, archive, notes, clock)
        step = learner.progress.step
        told = any_rank_is_told(shutdown, learner.ranks)
        if told or step % learner.config.learner.checkpoint_every == 0 or step == last:
            if notes:
                begin_checkpoint(learner, notes.keeper())
            else:
                begin_checkpoint(learner)
        clock.lap("checkpoint")
    return learner.progress.step >= last


def _step(learner: Learner, archive: Archive, notes: "_Notes | None", clock: Clock) -> None:
    learner.checkpoints.raise_failure()
    replay = learner.config.replay
    archived = archive.read(
        learner.progress.step + 1,
        vocab_size=learner.model.vocab_size,
        max_group_bytes=replay.group_size * replay.max_trajectory_bytes,
    )
    clock.lap("wait")
    # The run's own number: whenever its learner was resumed, some were left out.
    before = msgspec.structs.replace(learner.progress, policy_version=archived.policy_version)
    learner.progress = before
    newest = max(group.ticket.group_id for group in archived.groups)
    batch = Batch(groups=archived.groups, num_dropped={}, next_group_id=max(before.next_group_id, newest + 1))
    batch = judged(learner, batch)
    metrics = train_on(learner, batch, clock)
    if notes:
        notes.record_step(batch, metrics, before, clock.take())
    clock.lap("record")


class _Notes:
    """What people watch of a re-run; rank 0 takes them."""

    def __init__(self, learner: Learner) -> None:
        run_dir, step = learner.run_dir, learner.progress.step
        self._flops = learner.flops
        self._tally_path = run_dir.tally
        self._tally = load_tally(run_dir.tally)
        self._writer = MetricsWriter(jsonl=run_dir.metrics, tensorboard=run_dir.tensorboard, resume_step=step)
        self._writer.lay_out(OVERVIEW)

    def record_step(self, batch: Batch, step: StepMetrics, before: Progress, times_s: dict[str, float]) -> None:
        """Write everything about the step that followed `before`, and one line for people."""
        metrics = step_metrics(
            batch, step, policy_version=before.policy_version, times_s=times_s, flops=self._flops, tally=self._tally
        )
        means = self._writer.write(before.step + 1, metrics)
        log.info("step %d reward %.3f in %.1f s", before.step + 1, means["reward/mean"], sum(times_s.values()))

    def keeper(self) -> Callable[[], None]:
        """What keeps the sum of the steps so far, to be called in any thread once a checkpoint covers them."""
        return partial(save_tally, copy.deepcopy(self._tally), self._tally_path)

    def close(self) -> None:
        self._writer.close()
