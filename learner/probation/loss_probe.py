"""Measures on the loss how large a token's weight can get, and which bounds of an objective have no effect.

    weight = |gradient of the loss by a token's log-probability| / |advantage|

It tries tokens at many ratios of current to behaviour. Each token has a neighbour in its sequence, so that means over a
sequence also see one far-off token in an otherwise close sequence. For a part of the user's, which may judge a sequence
in any way, it has many such neighbours as well. KL and entropy are left out: they do not depend on the advantage.
"""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.ratio import Sequences
from slipstream.learner.step.loss import policy_loss

# The largest weight that still counts as bounded: published recipes use 1.2 to 10, and 20 with a trust region.
MAX_WEIGHT = 20.0
# Ratios from 6e-7 to 2e8. One is just above MAX_WEIGHT, so that any cap above it is detected.
_LOG_RATIOS = math.log(1.001 * MAX_WEIGHT) + math.log(10) * torch.arange(-30, 29, dtype=torch.float64) / 4
_RATIOS = (0.3, 0.7, 0.9, 1.0, 1.1, 1.5, 4.0)
_LEVELS = (-0.01, -1.0, -6.0)  # log-probabilities of current: some parts compare probabilities, not ratios
_NUM_NEIGHBOURS, _SAME = 5, 2  # what a token's neighbour may be; the third has the token's own ratio
_LONG = 1000  # the length of long sequences
_CHANGE = 0.05  # relative change of a bound, down and up, to see whether it has an effect


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBound:
    """The largest weight of a token, by the sign of its advantage."""

    positive: float
    negative: float


def weight_bound(objective: ObjectiveConfig) -> WeightBound:
    """The largest weight that a token can get.

    PPO's clip of 1.28 gives 1.13 for a positive advantage, which is the largest ratio tried below the clip, and 2e8 for
    a negative advantage. A dual clip of 3 reduces the latter to 2.
    """
    tries = [(2, 1.0)]  # the length of sequences, and the size of advantages
    if objective.has_own_loss:  # whose parts need not be linear in the advantage
        tries += [(2, 0.1), (2, 10.0), (_LONG, 1.0)]
    largest = {1.0: 0.0, -1.0: 0.0}
    for (length, size), sign in itertools.product(tries, largest):
        tried = _tried(_LOG_RATIOS, length=length)
        weight = float(_gradient(objective, tried, sign=sign * size).abs().max()) / size
        largest[sign] = max(largest[sign], weight)
    return WeightBound(positive=largest[1.0], negative=largest[-1.0])


def acts(objective: ObjectiveConfig, name: str, *, without: Mapping[str, float] | None = None) -> bool:
    """Whether the bound `objective.<name>` has an effect: a slightly other value changes the gradient of some token.

    It has none if another bound stops every token before it, as a token mask of [0.5, 5] does for a clip_high of 9.
    `without` are other bounds, with the values that switch them off.
    """
    objective, value = _with(objective, without or {}), float(getattr(objective, name))
    for changed in (value * (1 - _CHANGE), value * (1 + _CHANGE)):
        log_ratios = _log_ratios_at((value + changed) / 2)
        tried, other = _tried(log_ratios), _with(objective, {name: changed})
        if any(
            not torch.equal(*(_gradient(each, tried, sign=sign) for each in (objective, other))) for sign in (1, -1)
        ):
            return True
    return False


def ignores_lag(objective: ObjectiveConfig) -> bool:
    """Whether all tokens with a gradient have the same weight, whatever their ratio to the behaviour policy."""
    tried = _tried(_LOG_RATIOS)
    for sign in (1.0, -1.0):
        for level in _gradient(objective, tried, sign=sign).abs().view(len(_LEVELS), -1):
            left = level[level > 0]
            if len(left) and float(left.max()) > (1 + 1e-6) * float(left.min()):
                return False
    return True


def still_pushes(objective: ObjectiveConfig, *, signs: Sequence[float]) -> bool:
    """Whether a token keeps a gradient when its whole sequence was pushed by a factor of 1,000: up if the sign of its
    advantage is positive, down if it is negative.
    """
    for sign in signs:
        tried = _tried(torch.tensor([sign * math.log(1000)]).double())
        gradient = _gradient(objective, tried, sign=sign).view(len(_LEVELS), _NUM_NEIGHBOURS, -1)
        if gradient[:, _SAME].any():
            return True
    return False


def _with(objective: ObjectiveConfig, values: Mapping[str, float | str]) -> ObjectiveConfig:
    changed = copy.copy(objective)  # not `replace`, which would check that the values fit together
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _log_ratios_at(bound: float) -> Tensor:
    """A few log-ratios, and those where `bound` may act: as a ratio, as a distance from 1, or as a mean in nats.

    601 ratios between 1/20 and 20 are for bounds on probabilities, which act at no particular ratio.
    """
    ratios = [*_RATIOS, bound, 1 + bound, 1 - bound, math.exp(-bound), math.exp(min(bound, 20))]
    few = torch.tensor([ratio for ratio in ratios if 0 < ratio < math.inf], dtype=torch.float64).log()
    return torch.cat([few, torch.linspace(-3, 3, 601, dtype=torch.float64)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """Log-probabilities of sequences of equal length, [sequences * length]: the first token of each is examined."""

    current: Tensor
    behaviour: Tensor
    length: int


def _tried(log_ratios: Tensor, *, length: int = 2) -> _Tried:
    current, lagged, neighbour = (
        axis.flatten()
        for axis in torch.meshgrid(
            log_ratios.new_tensor(_LEVELS), log_ratios, log_ratios.new_tensor(range(_NUM_NEIGHBOURS)), indexing="ij"
        )
    )
    # The log-ratio of the neighbours: the opposite, 0, the same, far below, far above.
    far = torch.full_like(lagged, -13.0), torch.full_like(lagged, 18.0)
    neighbours = torch.stack([-lagged, torch.zeros_like(lagged), lagged, *far])
    chosen = neighbours.gather(0, neighbour.long()[None])[0]
    together = torch.stack([lagged, *[chosen] * (length - 1)], dim=1).flatten()
    behaviour = current.repeat_interleave(length) - together
    return _Tried(current=behaviour + together, behaviour=behaviour, length=length)


def _gradient(objective: ObjectiveConfig, tried: _Tried, *, sign: float) -> Tensor:
    """The gradient of the loss by the log-probability of each first token; every advantage is `sign`."""
    part = _with(objective, {"entropy_bonus": 0.0, "normalisation": "tokens"})
    current = tried.current.clone().requires_grad_()
    num = len(current) // tried.length
    tokens = LossTokens(
        current_logprobs=current,
        behaviour_logprobs=tried.behaviour,
        advantages=torch.full_like(tried.current, sign),
        entropies=torch.zeros_like(tried.current),
        lags=torch.zeros_like(tried.current, dtype=torch.long),
        sequences=Sequences(
            ids=torch.arange(num).repeat_interleave(tried.length),
            num=num,
            trajectories=torch.arange(num),
            trajectory_tokens=torch.full((num,), tried.length),
        ),
    )
    loss = policy_loss(tokens, objective=part)
    (gradient,) = torch.autograd.grad(loss.loss_sum, current)
    return gradient[:: tried.length]
