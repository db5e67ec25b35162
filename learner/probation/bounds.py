"""Checks the bounds of an objective with the loss itself: token weights are bounded, and every bound has an effect.

python -m slipstream.learner.probation.bounds < {objective, max_lag, max_uses}

If the objective is refused, the reason is on stdout, and the exit code is 2.
"""

import json
import sys

import torch

from slipstream.common.config.config import Config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.objective.coherence import REFUSED, reads
from slipstream.learner.probation.loss_probe import MAX_WEIGHT, acts, weight_bound
from slipstream.learner.probation.own_parts import check_own_parts

_CPU = torch.device("cpu")
# Keys that limit a token's weight, or mask the token.
_CAPS = ("clip_high", "ratio_high", "dual_clip", "mask_high")
# Bounds on ratios and on distances between policies, each with the value that switches it off.
_BOUNDS = {
    "clip_low": 1 - 1e-9,
    "clip_high": 1e9,
    "dual_clip": 0.0,
    "ratio_high": 1e9,
    "max_total_variation": 1e9,
    "mask_low": 0.0,
    "mask_high": 1e9,
    "max_negative_kl": 0.0,
}


def check_bounds(objective: ObjectiveConfig, *, max_lag: int, max_uses: int, device: torch.device = _CPU) -> None:
    """Raise ConfigError if a part of the user's is wrong, if a token can get too large a weight under lag, or if a
    bound has no effect.
    """
    check_own_parts(objective, max_lag=max_lag, max_uses=max_uses, device=device)
    if max_lag > 0:
        _check_weights(objective, max_lag)
    _check_reach(objective)


def check_on_rank(config: Config, *, device: torch.device) -> None:
    """Raise ConfigError if a part of the user's, as this rank imports it from its own disk, is wrong."""
    if config.objective.own_parts:
        check_bounds(config.objective, max_lag=config.replay.max_lag, max_uses=config.replay.max_uses, device=device)


def main() -> int:
    """Check the objective on stdin; print the reason and return 2 if it is refused."""
    question = json.load(sys.stdin)
    try:
        check_bounds(ObjectiveConfig(**question.pop("objective")), **question)
    except ConfigError as error:
        print(error)
        return REFUSED
    return 0


def _check_weights(objective: ObjectiveConfig, max_lag: int) -> None:
    bound = weight_bound(objective)
    largest = max(bound.positive, bound.negative)
    if largest <= MAX_WEIGHT:
        return
    sign = "positive" if bound.positive > MAX_WEIGHT else "negative"
    lower = [
        f"objective.{name} (it is {getattr(objective, name):g})"
        for name in _CAPS
        if reads(objective, name) and getattr(objective, name) > MAX_WEIGHT
    ]
    cures = [f"lower {' and '.join(lower)} to {MAX_WEIGHT:g} at most"] if lower else []
    if objective.surrogate in ("ppo_clip", "gspo") and not objective.dual_clip:
        mask = ", or objective.correction=token_mask" if objective.surrogate == "ppo_clip" else ""
        cures.append(f"set objective.dual_clip=3{mask}")
    cures += [f"limit the weight in {own}" for own in objective.own_parts.values() if own != objective.advantage]
    objective.refuse(
        "surrogate, correction",
        f"a token of {sign} advantage can get a weight of {largest:.3g}, which is as good as unclipped; unclipped "
        f"importance sampling collapses under lag (replay.max_lag is {max_lag})",
        f"{'; '.join(cures)}; or train with replay.target_lag=0 and replay.max_lag=0",
    )


def _check_reach(objective: ObjectiveConfig) -> None:
    """Refuse a bound that no token can reach, because another bound stops every token before it."""
    read = [name for name, off in _BOUNDS.items() if getattr(objective, name) != off and reads(objective, name)]
    for name in read:
        if not acts(objective, name):
            first = [
                f"objective.{other}={getattr(objective, other):g}"
                for other in read
                if other != name and acts(objective, name, without={other: _BOUNDS[other]})
            ]
            objective.refuse(
                name,
                f"it has no effect: {' or '.join(first) or 'the surrogate'} stops every token before it",
                "change one of the two, or switch one off",
            )


if __name__ == "__main__":
    sys.exit(main())
