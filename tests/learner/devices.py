"""What two devices, or two ways on one, compute is compared."""

import dataclasses

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.ranks.ranks import Ranks
from tests.tools.run.tiny_model import VOCAB_SIZE


def on_cpu(ranks: Ranks) -> Ranks:
    """The same rank, on the CPU, in the same process."""
    if ranks.device.type == "cpu":
        return ranks
    return dataclasses.replace(ranks, device=torch.device("cpu"), mesh=init_device_mesh("cpu", (1,)))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root of the mean squared error, as a fraction of that of the numbers."""
    found, exact = (each.detach().cpu().double() for each in (found, exact))
    return float((found - exact).norm() / exact.norm())


def gradients(model: PackedModel) -> list[Tensor]:
    """Every gradient, whole; they are forgotten in the model."""
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    return found


def kept_bytes(model: PackedModel, packed: Packed) -> int:
    """What a forward pass keeps for the backward pass, weights left out."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.shape[:1] != (VOCAB_SIZE,):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = model(packed).logprobs
    del logprobs
    return sum(kept.values())
