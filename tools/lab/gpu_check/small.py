"""Small models for the GPU check, batches for them, and whole optimizer steps of the learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import TokenSequence, count_loss_tokens, count_trajectories, micro_batches, numbered
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_model
from slipstream.learner.model.shards import named_shards
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.tools.lab.families.tiny import FAMILIES, MAX_TOKENS, save_tiny, sequence

LR = 1e-3
LENGTHS = (70, 41, 33, 90, 9, 120, 64, 25)
# The same step for every batch: no token is masked by chance, and no guard skips one.
OBJECTIVE = ObjectiveConfig(correction="none", max_negative_kl=0, guard_min_ess=0, guard_max_ratio=0)


def one_rank(device: str) -> Ranks:
    """Be the only rank, on `device`. Raises RuntimeError if PyTorch found another one."""
    ranks = join_ranks(timeout_s=60)
    if ranks.device.type != device:
        raise RuntimeError(f"the check is to run on {device}, and PyTorch found {ranks.device}; see `environment`")
    return ranks


def on_cpu(ranks: Ranks) -> Ranks:
    """The same rank, on the CPU, in the same process."""
    device = torch.device("cpu")
    return Ranks(rank=ranks.rank, num_ranks=ranks.num_ranks, device=device, mesh=init_device_mesh("cpu", (1,)))


def save(family: str, root: Path) -> Path:
    """Write a tiny model of `family`; return its folder."""
    return save_tiny(FAMILIES[family], root / family)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A tiny model and what trains it."""

    model: PackedModel
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    ranks: Ranks
    micro_batch_tokens: int

    def step(self, batch: Sequence[TokenSequence]) -> StepMetrics:
        """One optimizer step of the learner."""
        return train_step(
            StepModels(policy=self.model, optimizer=self.optimizer, schedule=self.schedule),
            StepBatch(
                micro_batches=micro_batches(batch, max_tokens=self.micro_batch_tokens, num_ranks=1, rank=0),
                num_loss_tokens=count_loss_tokens(batch),
                num_trajectories=count_trajectories(batch),
            ),
            settings=StepSettings(objective=OBJECTIVE, max_grad_norm=1.0),
            ranks=self.ranks,
        )

    def weights(self) -> dict[str, Tensor]:
        """A copy of every float32 weight, on the CPU."""
        return {name: local(shard).detach().cpu().clone() for name, shard in named_shards(self.model)}


def local(shard: Tensor) -> Tensor:
    """The tensor of this rank, which has all of it."""
    return shard.to_local() if isinstance(shard, DTensor) else shard


def load(folder: Path, *, ranks: Ranks, dtype: str, micro_batch_tokens: int = 256) -> Trained:
    """Load the model of `folder` as the learner does."""
    settings = ModelSettings(dtype=dtype, temperature=1.0, chunk_tokens=64, max_tokens=MAX_TOKENS)
    model = load_model(folder, ranks=ranks, settings=settings)
    optim = OptimConfig(lr=LR)
    optimizer = make_optimizer(model, config=optim)
    schedule = make_schedule(optimizer, config=optim, num_steps=100)
    return Trained(
        model=model, optimizer=optimizer, schedule=schedule, ranks=ranks, micro_batch_tokens=micro_batch_tokens
    )


def batch(step: int, vocab_size: int) -> list[TokenSequence]:
    """The sequences of a step, with advantages of both signs, sampled by a policy without a preference."""
    random = np.random.default_rng(step)
    found = []
    for number, length in enumerate(LENGTHS):
        plain = sequence(length, seed=100 * step + number, prompt=3)
        logprobs = np.where(plain.loss_mask, -np.log(vocab_size), 0.0).astype(np.float32)
        advantages = np.full(length, random.normal(), dtype=np.float32)
        found.append(
            TokenSequence(
                tokens=plain.tokens,
                loss_mask=plain.loss_mask,
                behaviour_logprobs=logprobs,
                advantages=advantages,
                kept=None,
            )
        )
    return numbered([each] for each in found)
