"""A model of which no rank but the first ever holds the whole: the others get their shards from it.

rank 0 reads the folder | all make a skeleton: shapes, no memory | shard it | rank 0 hands out one tensor at a time
"""

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.ranks import Ranks
from learner.share import share


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why rank 0 takes no model from the folder."""

    reason: str


def skeleton_of(folder: Path, *, attention: str) -> PreTrainedModel:
    """The causal LM of `folder` without its weights: float32 parameters and buffers on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation=attention
        )


def agree(refusal: Refusal | None, *, ranks: Ranks) -> None:
    """Raise ValueError on every rank where rank 0 has a `refusal`. Collective."""
    refusal = share(refusal, Refusal, ranks=ranks)
    if refusal is not None:
        raise ValueError(refusal.reason)


def tensors_of(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Everything that a skeleton lacks: every parameter and every buffer, also those that no folder holds."""
    return {**dict(causal_lm.named_parameters()), **dict(causal_lm.named_buffers())}


@torch.no_grad()
def fill(skeleton: PreTrainedModel, tensors: dict[str, Tensor], *, ranks: Ranks, cpu_offload: bool) -> None:
    """Give the sharded `skeleton` memory and put `tensors` into it, which only rank 0 need have. Collective.

    With `cpu_offload` the memory of its parameters is the host's. Each tensor is let go of when its shards are handed
    out, so that rank 0 has room for its own.
    """
    skeleton.to_empty(device="cpu" if cpu_offload else ranks.device)
    for name, parameter in skeleton.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = tensors.pop(name).detach() if ranks.rank == 0 else torch.empty(parameter.shape, device=ranks.device)
        parameter.to_local().copy_(distribute_tensor(whole, ranks.mesh, parameter.placements).to_local())
    for name, empty in list(skeleton.named_buffers()):
        buffer = tensors.pop(name).to(ranks.device) if ranks.rank == 0 else empty.to(ranks.device)
        dist.broadcast(buffer, src=0)
        module, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(module), leaf, buffer)
