"""The gradient of one optimizer step: summed over micro-batches and ranks, clipped, applied and cleared."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from slipstream.learner.batch.pack import Packed, TokenSequence, micro_batches
from slipstream.learner.model.packed_model import PackedModel, expect_backward
from slipstream.learner.ranks.ranks import Ranks

MAX_SHOWN = 8  # shapes in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The result of one optimizer step."""

    grad_norm: float
    lr: float
    skipped: bool


def backward(loss_sum: Tensor, *, ranks: Ranks, divisor: float) -> None:
    """Add the gradient of this micro-batch's `loss_sum` / `divisor`; FSDP adds up those of all ranks."""
    # FSDP averages gradients over the ranks, but a sum is needed: num_ranks undoes the average, here and nowhere else.
    torch.autograd.backward(loss_sum * (ranks.num_ranks / divisor))


def backward_over(
    model: PackedModel,
    sequences: Sequence[TokenSequence],
    loss_of: Callable[[Packed], Tensor],
    *,
    max_tokens: int,
    ranks: Ranks,
    divisor: float,
) -> float:
    """Add up the gradient of the sum of `loss_of` / `divisor` over the micro-batches of all ranks; return that sum.

    Every rank passes all sequences; a micro-batch has at most `max_tokens`.
    """
    packs = micro_batches(
        sequences,
        max_tokens=max_tokens,
        num_ranks=ranks.num_packing,
        rank=ranks.packing_rank,
        share_prefixes=model.shares_prefixes,
        context=ranks.context,
    )
    losses = []
    for number, packed in enumerate(packs, start=1):
        expect_backward(model, last=number == len(packs))
        loss = loss_of(packed.to(ranks.device))
        backward(loss, ranks=ranks, divisor=divisor)
        losses.append(loss.detach())
    return ranks.summed({"loss": torch.stack(losses).sum()})["loss"]


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The global norm of the gradient of all parameters of `optimizer`, the same on every rank. Collective."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in _parameters(optimizer) if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def apply_gradient(
    optimizer: torch.optim.Optimizer, schedule: LambdaLR, *, max_grad_norm: float, scale: float = 1.0
) -> Update:
    """Clip the gradient to a global norm of `max_grad_norm`, update parameters and schedule, clear the gradient.

    `scale` multiplies the learning rate of this update only. With 0, or if the gradient is not finite, nothing changes.
    Raises RuntimeError if a parameter that would be updated has no gradient.
    """
    lr = float(optimizer.param_groups[0]["lr"]) * scale
    norm = gradient_norm(optimizer)
    grad_norm = float(norm)
    updates = math.isfinite(grad_norm) and scale > 0
    if updates:
        _check_complete(optimizer)
        torch.nn.utils.clip_grads_with_norm_(_parameters(optimizer), max_grad_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] *= scale
        optimizer.step()
        schedule.step()  # sets the next learning rate from the schedule alone, so `scale` does not last
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=grad_norm, lr=lr, skipped=not updates)


def _check_complete(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a parameter has no gradient: it would never be trained, and nothing else would show it."""
    parameters = _parameters(optimizer)
    without = [tuple(parameter.shape) for parameter in parameters if parameter.grad is None]
    if without:
        raise RuntimeError(
            f"{len(without)} of {len(parameters)} trainable parameters have no gradient, of shapes "
            f"{', '.join(map(str, without[:MAX_SHOWN]))}: the model does not use them, or this version of PyTorch "
            "loses their gradient; freeze them, or install the versions of requirements/lock.txt"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
