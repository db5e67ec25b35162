"""The guard of a step: where the policies that sampled the batch are too far from the current one, step less or not."""

from dataclasses import dataclass

from common.objective_config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of a step, and why."""

    scale: float  # of the step's learning rate: 1 is the whole step, 0 is none
    reason: str  # empty for a whole step


def judge(*, effective_sample_size: float, ratio_mean: float, objective: ObjectiveConfig) -> Verdict:
    """Judge a step by the ratios of current to behaviour over its loss tokens, as they were before any cut.

        skip     where mean(ratio) is outside [1 / guard_max_ratio, guard_max_ratio]; at any lag it should be near 1
        scale    by ESS / guard_min_ess where ESS = mean(ratio)^2 / mean(ratio^2) is below guard_min_ess

    A threshold of 0 is off. As in https://arxiv.org/abs/2602.17616, a batch that is worth fewer samples gets a smaller
    step: with a threshold of 0.3, an ESS of 0.15 halves it.
    """
    most, least = objective.guard_max_ratio, objective.guard_min_ess
    if most and not 1 / most <= ratio_mean <= most:
        return Verdict(
            scale=0.0,
            reason=f"the mean ratio to the behaviour policy is {ratio_mean:.3g}, outside [{1 / most:.3g}, {most:.3g}] "
            "(objective.guard_max_ratio)",
        )
    if effective_sample_size < least:
        return Verdict(
            scale=effective_sample_size / least,
            reason=f"the effective sample size is {effective_sample_size:.3g} of the batch, below {least:.3g} "
            "(objective.guard_min_ess)",
        )
    return Verdict(scale=1.0, reason="")
