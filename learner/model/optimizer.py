"""The optimizer, AdamW, and its learning rate schedule."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slipstream.common.config.learner_config import OptimConfig

BETAS = (0.9, 0.95)  # decay of the gradient's mean and of its square
EPS = 1e-8  # added to the denominator


def make_optimizer(model: nn.Module, *, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) over the trainable parameters; its state is sharded, in float32."""
    spared, decayed = list[nn.Parameter](), list[nn.Parameter]()  # spared: norms and biases, also stacked ones
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (spared if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    return torch.optim.AdamW(
        [dict[str, Any](params=decayed), dict[str, Any](params=spared, weight_decay=0.0)],
        lr=config.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over memory; unfused it takes a tenth of a small step
    )


def begin_moments(optimizer: torch.optim.AdamW) -> None:
    """Create the state that the first step would create, so that its tensors can be written and restored."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),  # fused AdamW expects it on the device
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def make_schedule(optimizer: torch.optim.Optimizer, *, config: OptimConfig, num_steps: int) -> LambdaLR:
    """The learning rate of each of `num_steps` optimizer steps, as a fraction of `config.lr`: see `lr_fraction`."""
    fraction = partial(lr_fraction, schedule=config.schedule, warmup_steps=config.warmup_steps, num_steps=num_steps)
    return LambdaLR(optimizer, fraction)


def lr_fraction(step: int, *, schedule: str, warmup_steps: int, num_steps: int) -> float:
    """The learning rate at `step`, counted from 0, as a fraction of the highest one.

    The warm-up is linear from 1/(warmup_steps + 1), so no step has a rate of 0. Then the rate is constant, or falls to
    0 at `num_steps`, linearly or along half a cosine. At step 75 of 100 without warm-up: 1, 0.25, 0.146.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
