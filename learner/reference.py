"""The reference: the policy that reinforcement learning began with, frozen, for objectives that hold on to it."""

import torch.distributed as dist

from common.config import Config
from common.config_error import ConfigError
from common.run_dir import RunDir
from learner.export import save_hf
from learner.model import PackedModel, load_model
from learner.ranks import Ranks


def frozen_reference(
    model: PackedModel, config: Config, run_dir: RunDir, *, step: int, ranks: Ranks
) -> PackedModel | None:
    """Return the reference of a run that stands at `step`, None where its objective has no KL divergence.

    Before the first step that is `model` as it is, and it is written down: a resumed run reads it from there. It costs
    the memory of the weights once more, and a forward pass in each step. Every rank calls it, on one file system.
    Raises ConfigError for a run that began without one.
    """
    if not config.objective.kl_coefficient:
        return None
    if step == 0:
        save_hf(model, run_dir.reference, ranks=ranks)
        dist.barrier()  # the others read what rank 0 writes
    elif not run_dir.reference.is_dir():
        raise ConfigError(
            f"`objective.kl_coefficient` must be 0, got {config.objective.kl_coefficient}; this run began without a "
            "reference, so start a new one"
        )
    reference = load_model(
        run_dir.reference, ranks=ranks, dtype=config.model.dtype, activation_checkpointing=False
    )  # fmt: skip
    return reference.requires_grad_(False)
