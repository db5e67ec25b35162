"""Tries the user's own parts of an objective before training, and refuses those that could not be trained with.

What a part returns is checked on small batches. Whether it corrects for lag, and whether it stops pushing a token that
is far from the policy that sampled it, is measured on the loss (`slipstream.learner.probation.loss_probe`), as are the
weights of tokens.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.credit.grpo import own_advantages
from slipstream.learner.objective.coherence import COLLAPSING_LAG
from slipstream.learner.objective.correction import correction
from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.ratio import MAX_LOG_RATIO, Sequences
from slipstream.learner.objective.surrogate import Surrogate, surrogate
from slipstream.learner.probation.loss_probe import ignores_lag, still_pushes

CALLED = {
    "advantage": "function(returns)",
    "surrogate": "function(current_logprobs, *, behaviour_logprobs, advantages, sequences)",
    "correction": "function(current_logprobs, *, behaviour_logprobs, advantages, sequences)",
}
RETURNS = ([0.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 3, [0.5, 0.5], [-3.0, 100.0, 0.25, 7.0, 0.25])
# Batches of log-ratios of current to behaviour, by sequence.
EQUAL = ((0.0, 0.0, 0.0), (0.0, 0.0), (0.0,))
NEAR = ((0.05, -0.1, 0.1), (1.5, -0.7), (-3.0,))
# only `slipstream.learner.objective.ratio` keeps their ratios finite
FAR = ((100.0, 0.0, -100.0), (-100.0,), (100.0, 100.0))
ADVANTAGES = (1.0, -0.5, 2.0)  # of each sequence

Answer = TypeVar("Answer")


def check_own_parts(objective: ObjectiveConfig, *, max_lag: int, max_uses: int, device: torch.device) -> None:
    """Raise ConfigError unless every part of the user's keeps the contract of docs/extend.md."""
    if "advantage" in objective.own_parts:
        _check_advantage(objective.advantage)
    if "surrogate" in objective.own_parts:
        _check_surrogate(objective, device)
    if "correction" in objective.own_parts:
        _check_correction(objective, device)
    if objective.has_own_loss:
        _check_lag(objective, max_lag=max_lag, max_uses=max_uses)


def _check_advantage(name: str) -> None:
    what, anything = f"`objective.advantage` {name!r}", False

    def advantages(returns: list[float]) -> npt.NDArray[np.float64]:
        return _called(what, "advantage", partial(own_advantages, name, returns))

    for returns in RETURNS:
        found, again = advantages(returns), advantages(returns)
        if not np.array_equal(found, again):
            raise ConfigError(f"{what} gave {found} and then {again} for {returns}; make it a function of the returns")
        turned = advantages([*returns[1:], returns[0]])
        if not np.allclose(turned, np.roll(found, -1)):
            raise ConfigError(
                f"{what} gives {found} for {returns}, and {turned} when the first return comes last; the order of "
                "siblings has no meaning: equal returns must get equal advantages"
            )
        if found[np.argmax(returns)] < found[np.argmin(returns)]:
            raise ConfigError(
                f"{what} gives {found} for {returns}: the best attempt is trained less than the worst; change its sign"
            )
        anything = anything or bool(found.any())
    if not anything:
        raise ConfigError(f"{what} gave only zeros, as for {RETURNS[0]}; nothing would be learned")


def _check_surrogate(objective: ObjectiveConfig, device: torch.device) -> None:
    what, is_moved = f"`objective.surrogate` {objective.surrogate!r}", False
    for tokens, part in _answers("surrogate", objective, device):
        gradient = _gradient(what, tokens, part)
        is_moved = is_moved or bool(gradient.any())
        stated = -part.weights * tokens.advantages
        is_clamped = bool((_log_ratios(tokens).abs() > MAX_LOG_RATIO).any())  # by `ratio`, which has no gradient there
        if not is_clamped and not torch.allclose(gradient, stated, rtol=1e-3, atol=1e-4):
            worst = int((gradient - stated).abs().argmax())
            raise ConfigError(
                f"{what} returns weights that are not those of its losses, and the guard would judge by them; for "
                f"log-ratio {_log_ratios(tokens)[worst]:.3g} and advantage {tokens.advantages[worst]:g}, -weight * "
                f"advantage is {stated[worst]:.4g}, and the gradient {gradient[worst]:.4g}"
            )
    if not is_moved:
        raise ConfigError(f"{what} gives no token a gradient; nothing would be learned")


def _gradient(what: str, tokens: LossTokens, part: Surrogate) -> Tensor:
    """The gradient of the losses by the log-probabilities. Raises ConfigError if they have no gradient."""
    gradient = None
    if part.losses.requires_grad:
        (gradient,) = torch.autograd.grad(part.losses.sum(), tokens.current_logprobs, allow_unused=True)
    if gradient is None:
        raise ConfigError(
            f"{what} returns losses without a gradient to current_logprobs; do not detach them, and compute them "
            "outside no_grad"
        )
    _check_finite(what, "the gradient of losses", gradient, tokens)
    return gradient


def _check_correction(objective: ObjectiveConfig, device: torch.device) -> None:
    alone = copy.copy(objective)
    alone.max_negative_kl = 0.0
    for _ in _answers("correction", alone, device):
        pass


def _check_lag(objective: ObjectiveConfig, *, max_lag: int, max_uses: int) -> None:
    """The rules that `slipstream.learner.objective.coherence` has for built-in parts by name, measured."""
    if max_lag > 0 and objective.advantage != "vtrace" and ignores_lag(objective):
        objective.refuse(
            "surrogate, correction",
            "every token that is trained has the same weight, whatever its ratio to the behaviour "
            f"policy: nothing would correct a stale token (replay.max_lag is {max_lag})",
            "multiply by the ratio, or train with replay.target_lag=0 and replay.max_lag=0",
        )
    if max_uses > 1 and still_pushes(objective, signs=(1.0, -1.0)):
        objective.refuse(
            "surrogate, correction",
            f"replay.max_uses is {max_uses}, and tokens keep a weight however far they were pushed: "
            "each use of a group pushes them further, without limit",
            "give them no gradient, or choose objective.correction=token_mask or replay.max_uses=1",
        )
    if "surrogate" in objective.own_parts and objective.max_negative_kl == 0 and max_lag >= COLLAPSING_LAG:
        uncorrected = copy.copy(objective)
        uncorrected.correction = "none"
        if still_pushes(uncorrected, signs=(-1.0,)):
            objective.refuse(
                "max_negative_kl",
                f"{objective.surrogate} clips no gradient of tokens that did badly, and such runs collapsed at a lag "
                f"of {COLLAPSING_LAG} (docs/studies/lag.md); replay.max_lag is {max_lag}",
                "use 0.1, with which they did not collapse",
            )


def _answers(key: str, objective: ObjectiveConfig, device: torch.device) -> Iterator[tuple[LossTokens, Any]]:
    """What the part returns for batches of each kind, after the checks that surrogate and correction share."""
    what = f"`objective.{key}` {objective.own_parts[key]!r}"
    compute: Callable[..., Any] = surrogate if key == "surrogate" else correction

    def answer(tokens: LossTokens) -> Any:
        return _called(what, key, partial(compute, tokens, objective=objective))

    answer(_tokens((), device))  # a micro-batch may have no loss tokens
    for log_ratios in (EQUAL, NEAR, FAR):
        tokens, first = _tokens(log_ratios, device), _tokens(log_ratios[:1], device)
        part, again, alone = answer(tokens), answer(tokens), answer(first)
        for name in ("losses", "weights") if key == "surrogate" else ("weights",):
            found = getattr(part, name)
            _check_finite(what, name, found, tokens)
            if found.requires_grad and name != "losses":
                raise ConfigError(f"{what} returns {name} with a gradient; return {name}.detach()")
            _check_repeats(what, name, found, again=getattr(again, name), alone=getattr(alone, name))
        if (part.weights < 0).any():
            raise ConfigError(f"{what} returns negative weights, which train bad attempts and untrain good ones")
        yield tokens, part


def _check_repeats(what: str, name: str, found: Tensor, *, again: Tensor, alone: Tensor) -> None:
    """Refuse other numbers in a second call, and for the first sequence `alone`."""
    if not torch.equal(found, again):
        raise ConfigError(f"{what} returns other {name} when it is called again; make it deterministic")
    if not torch.allclose(alone, found[: len(alone)]):
        raise ConfigError(
            f"{what} returns other {name} for a sequence when other sequences are in the batch: the objective would "
            "depend on how tokens are packed; use no mean or maximum over tokens (sequences.means is one over each "
            "sequence)"
        )


def _called(what: str, key: str, call: Callable[[], Answer]) -> Answer:
    """The result of `call`. Raises ConfigError for whatever the user's function raises."""
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"{what} failed: {type(error).__name__}: {error}; it is called as {CALLED[key]} (docs/extend.md), also "
            "with no tokens"
        ) from error


def _tokens(log_ratios: Sequence[Sequence[float]], device: torch.device) -> LossTokens:
    lengths = torch.tensor([len(each) for each in log_ratios], dtype=torch.long, device=device)
    flat = torch.tensor([each for sequence in log_ratios for each in sequence], dtype=torch.float32, device=device)
    numbers = torch.arange(len(lengths), device=device)
    ids = numbers.repeat_interleave(lengths)
    behaviour = -0.5 - flat.clamp(min=0)
    return LossTokens(
        current_logprobs=(behaviour + flat).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(ADVANTAGES, device=device)[ids],
        entropies=torch.zeros_like(behaviour),
        lags=torch.zeros_like(ids),
        sequences=Sequences(ids=ids, num=len(lengths), trajectories=numbers, trajectory_tokens=lengths),
    )


def _log_ratios(tokens: LossTokens) -> Tensor:
    return (tokens.current_logprobs - tokens.behaviour_logprobs).detach()


def _check_finite(what: str, name: str, values: Tensor, tokens: LossTokens) -> None:
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        where = int(bad[0])
        raise ConfigError(
            f"{what} returns {values[where]:g} in {name} for log-ratio {_log_ratios(tokens)[where]:.3g} and advantage "
            f"{tokens.advantages[where]:g}; slipstream.learner.objective.ratio.ratio stays finite"
        )
