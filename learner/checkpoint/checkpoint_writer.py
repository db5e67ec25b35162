"""Writes checkpoints in the background: the learner waits only for the copy of its state, not for the disk."""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from slipstream.common.process.output import sync_path
from slipstream.learner.checkpoint.checkpoint import (
    Progress,
    Snapshot,
    agreed_checkpoint,
    finished_checkpoints,
    step_of,
    take_snapshot,
    write,
)
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step import StepModels

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of a learner, one at a time, in a background thread of each rank.

    The threads use a separate process group, so that their collectives never mix with those of training.
    """

    def __init__(self, folder: Path, *, ranks: Ranks, keep: int, check: Callable[[], None] = lambda: None) -> None:
        """After each checkpoint, all but the newest `keep` in `folder` are removed. Collective.

        No earlier writer can finish a checkpoint there after this: `folder` stays as it is until `begin`. `check` is
        that of `Fence.take`, on rank 0.
        """
        self.fence = Fence(folder)
        if ranks.rank == 0:
            self.fence.take(check)
        self._folder = folder
        self._keep = keep
        self._group = dist.new_group(backend="gloo")
        on_gpu = ranks.device.type == "cuda"
        # Pinned memory is slow to get, so it is kept; a CPU's learner needs its own for the next step.
        self._stager = StateDictStager(pin_memory=True, share_memory=False) if on_gpu else None
        # A thread of its own begins on the first GPU, whatever GPU its rank has.
        use_device = partial(torch.cuda.set_device, ranks.device) if on_gpu else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=use_device)
        self._under_way: Future[None] | None = None

    def newest(self, *, ranks: Ranks) -> Path | None:
        """The checkpoint to resume from: see `agreed_checkpoint`. Damaged ones of later steps are set aside.

        Collective. Raises ConfigError, FencedOut.
        """
        newest = agreed_checkpoint(self._folder, ranks=ranks)
        if newest and ranks.rank == 0:
            _set_aside_after(newest, fence=self.fence)
        return newest

    def begin(self, models: StepModels, *, progress: Progress, once_durable: Callable[[], None] = lambda: None) -> None:
        """Wait for the previous checkpoint, copy the state, and start writing; every rank calls it.

        The thread calls `once_durable` when the checkpoint would survive a power loss. Raises what `wait` raises.
        """
        self.wait()
        snapshot = take_snapshot(models, progress=progress, stager=self._stager)
        self._under_way = self._thread.submit(self._write, snapshot, once_durable)

    def raise_failure(self) -> None:
        """Raise what `wait` would raise, if the checkpoint has already failed."""
        if self._under_way and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is durable and `once_durable` has returned.

        Raises ValueError if it could not be written, FencedOut, and any error of `once_durable`.
        """
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()

    def close(self) -> None:
        """Wait for the checkpoint in progress, whether it succeeds or not. Call it before `leave_ranks`."""
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()  # type: ignore[no-untyped-call]

    def _write(self, snapshot: Snapshot, once_durable: Callable[[], None]) -> None:
        write(self._folder, snapshot, group=self._group, keep=self._keep, fence=self.fence)
        once_durable()


def _set_aside_after(newest: Path, *, fence: Fence) -> None:
    """Rename every finished checkpoint of a step after that of `newest`: step_000020 becomes step_000020.damaged.

    They are damaged, and newer ones of lower steps are about to be written: later starts must not read these first, and
    `write` must not keep them in place of newer ones. Raises FencedOut.
    """
    with fence.held():
        for path in finished_checkpoints(newest.parent):
            if step_of(path) > step_of(newest):
                aside = path.with_name(f"{path.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log.warning("%s is set aside as %s; remove it when nothing of it is needed", path, aside.name)
        sync_path(newest.parent)
