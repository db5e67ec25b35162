"""The arms of the study of lag that are not presets: what each changes of the default objective, and of the optimizer.

What is published is written as the papers have it, as parts of the objective that a user could bring as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.learner.learner import Learner
from slipstream.learner.objective import guard
from slipstream.learner.objective.correction import Correction
from slipstream.learner.objective.ratio import MAX_LOG_RATIO, Sequences, ratio
from slipstream.learner.objective.surrogate import Surrogate, within_total_variation

MAX_SECOND_MOMENT = 0.04  # nats squared, M2PO's
MAX_WEIGHT = 20.0  # of a token, and of a trajectory where the whole of it has one weight
PULL = 0.05  # how strongly a token is drawn back to the probability with which it was sampled
_HERE = "slipstream.tools.lab.study.lag_arms"
_NOTHING_ELSE = ("objective.max_negative_kl=0", "objective.correction=none")
_TV = ("objective.surrogate=dppo_tv", f"objective.ratio_high={MAX_WEIGHT:g}", *_NOTHING_ELSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to learn from old episodes."""

    settings: tuple[str, ...] = ()
    momentum: float = 0.9  # Adam's first beta
    min_ess: float = guard.MIN_ESS  # below it, the learning rate shrinks with the square root of the sample size

    def change(self, learner: Learner) -> None:
        """Change a learner that has just been loaded, and what this process decides by."""
        guard.MIN_ESS = self.min_ess
        for group in learner.optimizer.param_groups:
            group["betas"] = (self.momentum, group["betas"][1])


ARMS = {
    "default": Arm(),
    "m2po": Arm(settings=("objective.max_negative_kl=0", f"objective.correction={_HERE}:second_moment")),
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
    "tv_vcpo": Arm(settings=_TV, min_ess=1.0),
    "tv_vcpo_linear": Arm(settings=(*_TV, "optim.schedule=linear"), min_ess=1.0),
    "tv_linear": Arm(settings=(*_TV, "optim.schedule=linear")),
    "tv_no_momentum": Arm(settings=_TV, momentum=0.0),
    "tv_narrow": Arm(settings=(*_TV, "objective.max_total_variation=0.05")),
    "tv_pull": Arm(settings=(*_NOTHING_ELSE, f"objective.surrogate={_HERE}:pulled")),
}


def second_moment(
    current_logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> Correction:
    """M2PO's mask, https://arxiv.org/abs/2510.01161, over a micro-batch: the tokens that moved most are left out, until
    the mean square of the others' log-ratios is at most MAX_SECOND_MOMENT. As in AReaL, PPO's clip is beside it.
    """
    squares, order = (current_logprobs - behaviour_logprobs).square().sort()
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    masked = torch.zeros_like(order, dtype=torch.bool)
    masked[order] = means > MAX_SECOND_MOMENT
    return Correction(weights=torch.ones_like(squares), masked=masked)


def whole_weights(
    current_logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> Correction:
    """Truncated sequence weights: the product of a trajectory's ratios, at most MAX_WEIGHT, for each of its tokens."""
    log_ratios = sequences.sums(current_logprobs - behaviour_logprobs)
    weights = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=MAX_WEIGHT)
    return Correction(weights=weights, masked=torch.zeros_like(weights, dtype=torch.bool))


def pulled(
    current_logprobs: Tensor, *, behaviour_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> Surrogate:
    """DPPO by total variation, less a pull back to the policy that sampled, which never turns a token's gradient round:

        weight = min(ratio, MAX_WEIGHT) where trusted, else 0;  less 2 * PULL * log(ratio) / A, and at least 0

    The second term is the gradient of PULL * log(ratio)^2.
    """
    trusted = within_total_variation(
        current_logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, max_divergence=0.2
    )
    weights = ratio(current_logprobs.detach(), other_logprobs=behaviour_logprobs).clamp(max=MAX_WEIGHT) * trusted
    log_ratios = (current_logprobs.detach() - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    pull = torch.where(advantages != 0, 2 * PULL * log_ratios / advantages, 0.0)
    weights = (weights - pull.clamp(min=0)).clamp(min=0)
    return Surrogate(losses=-weights * advantages * current_logprobs, weights=weights, held_back=weights == 0)
