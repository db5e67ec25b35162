"""The guard: shrinks or skips a step that is too far off-policy.

It looks only at what enters the gradient, after every mask, clip and cap. A token that is masked, or that a clip left
without gradient, does not count, however far off it is. So one broken actor cannot stall a run.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig

MIN_ESS = 0.3  # a step with a smaller effective sample size is shrunk
MAX_RATIO = 2.0  # a step with a mean weight above this, or below its inverse, is skipped
# Nats. One trajectory of 64 at this bound costs 13 % of the effective sample size, for any ratios.
MAX_DRIFT = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The statistics that the guard decides by, over all ranks."""

    weight_mean: float  # of the tokens with a gradient; 1 without such tokens
    token_ess: float  # (sum of weights)^2 / sum of squares / tokens with a gradient; 1 without such tokens
    trajectory_ess: float  # see `trajectory_ess`


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardDecision:
    """The decision about a step, and the reason."""

    scale: float  # of the step's learning rate: 1 for a whole step, 0 to skip it
    reason: str  # empty for a whole step


def decide(evidence: Evidence, *, objective: ObjectiveConfig) -> GuardDecision:
    """Decide about a step from the weights of its tokens and trajectories in the gradient.

        skip     if mean(weight) is outside [1 / MAX_RATIO, MAX_RATIO]; at any lag it should be near 1
        scale    by sqrt(ESS / MIN_ESS) if ESS is below MIN_ESS

    ESS is the smaller effective sample size of tokens and trajectories. As in VCPO,
    https://arxiv.org/abs/2602.17616, a batch that is worth fewer samples gets a smaller step, by the square root,
    as Adam's learning rate scales with the batch size: with a threshold of 0.3, an ESS of 0.075 halves the step. VCPO
    has no threshold, and shrinks every step that is not on-policy.
    """
    if not objective.guard:
        return GuardDecision(scale=1.0, reason="")
    if not 1 / MAX_RATIO <= evidence.weight_mean <= MAX_RATIO:
        return GuardDecision(
            scale=0.0,
            reason=f"the mean weight in the gradient is {evidence.weight_mean:.3g}, outside [{1 / MAX_RATIO:g}, "
            f"{MAX_RATIO:g}] (objective.guard)",
        )
    ess, of = min((evidence.token_ess, "tokens"), (evidence.trajectory_ess, "trajectories"))
    if ess < MIN_ESS:
        return GuardDecision(
            scale=math.sqrt(ess / MIN_ESS),
            reason=f"the effective sample size is {ess:.3g} of the {of}, below {MIN_ESS:g} (objective.guard)",
        )
    return GuardDecision(scale=1.0, reason="")


def trajectory_ess(
    log_ratio_sums: Float[Tensor, " trajectories"], *, num_tokens: Float[Tensor, " trajectories"]
) -> float:
    """The effective sample size of a batch by trajectory, as a fraction of its trajectories.

    Over the tokens of a trajectory that are not masked, in all its branches, packs and ranks:

        mean[i]  = sum of log(current / behaviour) / tokens
        drift[i] = sqrt(tokens) * (mean[i] - median(mean)),  within [-3, 3]
        ESS      = max(exp(-variance(drift)), 1 / trajectories)

    For log-normal weights exp(drift) this is (sum of weights)^2 / sum of squares / trajectories. VCPO's weight of a
    trajectory is the product of its tokens' ratios, exp(sum). For the long trajectories of an agent that is noise:
    numerical differences between actors and learner of 0.001 nats per token (`mismatch/kl`) give an ESS of 0.9 over 50
    tokens, but 0.4 over 500 and 0.00005 over 5000, without any lag. The mean is the other extreme: it ignores how many
    tokens agree. With sqrt(tokens), independent noise counts the same at any length (0.998 in all three cases), and a
    drift that all tokens of a trajectory share counts more, the more tokens there are. If trajectories drift by 0.1
    nats per token, ESS is 0.78 over 25 tokens, 0.37 over 100, and 0.05 over 400; that of the tokens stays at 0.99.

    Sums of (0, 0, 0, 10) over 100 tokens each are drifts of (0, 0, 0, 1), a variance of 0.1875, and an ESS of 0.829.
    Trajectories whose every token is masked do not count; if there are no others, the ESS is 1.
    """
    present = num_tokens > 0
    if not bool(present.any()):
        return 1.0
    sums, counts = log_ratio_sums[present].double(), num_tokens[present].double()
    means = sums / counts
    drifts = (counts.sqrt() * (means - means.median())).clamp(-MAX_DRIFT, MAX_DRIFT)
    return max(math.exp(-float(drifts.var(correction=0))), 1 / len(drifts))
