"""The arms of the study of lag that are not presets: what each changes of the default objective, and of the optimizer.

What is published is written as the papers have it, as parts of the objective that a user could bring as well.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.learner import Learner
from slipstream.learner.objective import guard
from slipstream.learner.objective.correction import Correction
from slipstream.learner.objective.ratio import MAX_LOG_RATIO, Sequences

MAX_WEIGHT = 20.0  # of a token, and of a trajectory where the whole of it has one weight
MAX_SECOND_MOMENT = 0.04  # of M2PO, as its authors and AReaL have it
_HERE = "slipstream.tools.lab.study.lag_arms"
_TV = (
    *("objective.surrogate=dppo_tv", f"objective.ratio_high={MAX_WEIGHT:g}"),
    *("objective.max_negative_kl=0", "objective.correction=none"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to learn from old episodes."""

    settings: tuple[str, ...] = ()
    momentum: float = 0.9  # Adam's first beta
    min_ess: float = guard.MIN_ESS  # below it, the learning rate shrinks with the square root of the sample size
    delay: int = 0  # optimizer steps by which each gradient is applied late, in place of a lag of the episodes

    def change(self, learner: Learner) -> None:
        """Change a learner that has just been loaded, and what this process decides by."""
        guard.MIN_ESS = self.min_ess
        for group in learner.models.optimizer.param_groups:
            group["betas"] = (self.momentum, group["betas"][1])
        if self.delay:
            delay_gradients(learner.models.optimizer, self.delay)


def delay_gradients(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Apply the gradient of `num_steps` steps before, and none in the first ones."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    waiting, step = deque[list[Tensor | None]](), optimizer.step

    def late_step() -> None:
        waiting.append([parameter.grad for parameter in parameters])
        if len(waiting) > num_steps:
            for parameter, gradient in zip(parameters, waiting.popleft(), strict=True):
                parameter.grad = gradient
            step()

    optimizer.step = late_step  # type: ignore[assignment, method-assign]


ARMS = {
    "default": Arm(),
    "vtrace": Arm(
        settings=(
            *("objective.advantage=vtrace", "objective.critic=own", "objective.surrogate=policy_gradient"),
            "objective.correction=none",
        )
    ),
    "whole_weights": Arm(
        settings=(
            *("objective.surrogate=policy_gradient", "objective.max_negative_kl=0"),
            f"objective.correction={_HERE}:whole_weights",
        )
    ),
    "m2po": Arm(
        settings=(
            *("objective.surrogate=policy_gradient", "objective.max_negative_kl=0"),
            f"objective.correction={_HERE}:second_moment",
        )
    ),
    "tv_vcpo": Arm(settings=_TV, min_ess=1.0),
    "tv_vcpo_linear": Arm(settings=(*_TV, "optim.schedule=linear"), min_ess=1.0),
    "tv_linear": Arm(settings=(*_TV, "optim.schedule=linear")),
    "tv_no_momentum": Arm(settings=_TV, momentum=0.0),
    "late_16": Arm(delay=16),
    "tv_narrow": Arm(settings=(*_TV, "objective.max_total_variation=0.05")),
}


def whole_weights(
    current_logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> Correction:
    """Truncated sequence weights: the product of a trajectory's ratios, at most MAX_WEIGHT, for each of its tokens."""
    log_ratios = sequences.sums(current_logprobs - behaviour_logprobs)
    weights = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=MAX_WEIGHT)
    return Correction(weights=weights, masked=torch.zeros_like(weights, dtype=torch.bool))


def second_moment(
    current_logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> Correction:
    """M2PO, https://arxiv.org/abs/2510.01161: the ratio of each token, without those that are furthest off.

    As few are left out as bring the mean of log(ratio)^2, over the other tokens of the pack, to MAX_SECOND_MOMENT.
    """
    log_ratios = current_logprobs - behaviour_logprobs
    moments, order = log_ratios.square().sort()
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1)
    masked = torch.ones_like(log_ratios, dtype=torch.bool)
    masked[order[: int((means <= MAX_SECOND_MOMENT).sum())]] = False
    return Correction(weights=log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), masked=masked)
