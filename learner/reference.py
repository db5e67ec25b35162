"""The reference: the policy that the objective's KL divergence holds on to, frozen or replaced every so many steps.

It is written down when it is taken, tied to its step, so that a resumed run and a re-run hold on to the very same one.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from common.config import Config
from common.config_error import ConfigError
from common.run_dir import RunDir, sync_path
from learner.checkpoint import MANIFEST, step_of
from learner.model.export import save_hf
from learner.model.packed_model import PackedModel, load_model
from learner.ranks import Ranks


def reference_at(model: PackedModel, config: Config, run_dir: RunDir, *, step: int, ranks: Ranks) -> PackedModel | None:
    """Return the reference of a run that stands at `step`, None where its objective has no KL divergence.

    Before the first step that is `model` as it is, and again whenever `objective.reference_every` divides the step,
    which is GRPO's outer loop, https://arxiv.org/abs/2402.03300; it is then written down, and later read from there. It
    costs the memory of the weights once more, and a forward pass in each step. Every rank calls it, on one file system.
    Raises ConfigError for a run that has not written the one it needs.
    """
    objective = config.objective
    if not objective.kl_coefficient:
        return None
    taken_at = reference_step(step, every=objective.reference_every)
    folder = run_dir.reference / f"step_{taken_at:06d}"
    if taken_at == step:
        _write(model, folder, ranks=ranks)
    elif not folder.is_dir():
        raise ConfigError(
            f"`objective.kl_coefficient` must be 0, got {objective.kl_coefficient} with objective.reference_every "
            f"{objective.reference_every}; this run wrote no reference at step {taken_at}, so start a new one"
        )
    if ranks.rank == 0:
        _remove_older(run_dir, every=objective.reference_every)
    reference = load_model(folder, ranks=ranks, dtype=config.model.dtype, activation_checkpointing=False)
    return reference.requires_grad_(False)


def reference_step(step: int, *, every: int) -> int:
    """The step after which the reference of a run that stands at `step` was taken.

    >>> [reference_step(step, every=10) for step in (0, 9, 10, 25)], reference_step(25, every=0)
    ([0, 0, 10, 20], 0)
    """
    return step - step % every if every else 0


def _write(model: PackedModel, folder: Path, *, ranks: Ranks) -> None:
    """Whole or not at all: the folder gets its name when every byte is on the disk."""
    unnamed = folder.with_name(folder.name + ".tmp")
    if ranks.rank == 0:
        shutil.rmtree(unnamed, ignore_errors=True)
    save_hf(model, unnamed, ranks=ranks)
    if ranks.rank == 0:
        for path in (*unnamed.iterdir(), unnamed):
            sync_path(path)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed here: the same bits
        unnamed.rename(folder)
        sync_path(folder.parent)
    dist.barrier()  # the others read what rank 0 writes


def _remove_older(run_dir: RunDir, *, every: int) -> None:
    """Remove what no whole checkpoint asks for, nor one that is still being written: that is of a later step."""
    steps = [step_of(manifest.parent) for manifest in run_dir.checkpoints.glob(f"step_*/{MANIFEST}")]
    oldest = min((reference_step(step, every=every) for step in steps), default=0)
    for path in run_dir.reference.glob("step_*[0-9]"):
        if step_of(path) < oldest:
            shutil.rmtree(path)
