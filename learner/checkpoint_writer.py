"""Checkpoints are written while training goes on: the learner waits for the copy of its state, not for the disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim.lr_scheduler import LambdaLR

from learner.checkpoint import Progress, Snapshot, take_snapshot, write
from learner.model.critic import Critic
from learner.model.packed_model import PackedModel
from learner.ranks import Ranks


class CheckpointWriter:
    """Writes one learner's checkpoints, one at a time, in a thread of each rank.

    The threads meet over a process group of their own, so that their collectives never mix with those of training.
    """

    def __init__(self, folder: Path, *, ranks: Ranks, keep: int) -> None:
        """All but the newest `keep` in `folder` are removed after each. Every rank makes one, together."""
        self._folder = folder
        self._keep = keep
        self._group = dist.new_group(backend="gloo")
        on_gpu = ranks.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def begin(
        self,
        model: PackedModel,
        optimizer: torch.optim.AdamW,
        schedule: LambdaLR,
        critic: Critic | None = None,
        *,
        progress: Progress,
        once_durable: Callable[[], None],
    ) -> None:
        """Wait for the one under way, copy what is to be written, and return; every rank calls it.

        `once_durable` is called in the thread when the checkpoint survives a loss of power. Raises what `wait` raises.
        """
        self.wait()
        snapshot = take_snapshot(model, optimizer, schedule, critic, progress=progress, stager=self._stager)
        self._under_way = self._thread.submit(self._write, snapshot, once_durable)

    def raise_failure(self) -> None:
        """Raise what `wait` would raise, if that is known by now."""
        if self._under_way and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Return once the checkpoint under way is durable, and `once_durable` was called.

        Raises ValueError where it could not be written, and what `once_durable` raised.
        """
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()

    def close(self) -> None:
        """Let the checkpoint under way end, well or not. Call it before the ranks part."""
        self._thread.shutdown()
        self._stager.close()

    def _write(self, snapshot: Snapshot, once_durable: Callable[[], None]) -> None:
        write(self._folder, snapshot, group=self._group, keep=self._keep)
        once_durable()
