"""Parts of a user's with one mistake each, as `objective.*=tests.whole.wrong_parts:NAME`."""

import random
from dataclasses import replace

import numpy as np
import torch

from slipstream.learner.objective.correction import Correction
from slipstream.learner.objective.ratio import ratio
from slipstream.learner.objective.surrogate import Surrogate

NUMBER = 3.0


def above_a_half(returns):
    """No mistake: it compares with a fixed return, so groups of equal returns teach too."""
    return np.asarray(returns) - 0.5


def without_arguments():
    return 0


def divided_by_nothing(returns):
    with np.errstate(all="ignore"):
        return (np.asarray(returns) - np.mean(returns)) / np.std(returns)


def one_for_all(returns):
    return float(np.mean(returns))


def words(returns):
    return ["good" for _ in returns]


def upside_down(returns):
    return np.mean(returns) - np.asarray(returns)


def by_place(returns):
    return np.argsort(np.argsort(returns)).astype(float)


def noisy(returns):
    return np.asarray(returns) + random.random()


def nothing(returns):
    return np.zeros(len(returns))


def weighted(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    """No mistake on policy: importance sampling without a bound."""
    policy_ratio = ratio(current_logprobs, other_logprobs=behaviour_logprobs)
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(losses=-policy_ratio * advantages, weights=policy_ratio.detach(), held_back=none)


def too_few_arguments(current_logprobs, behaviour_logprobs):
    return -ratio(current_logprobs, other_logprobs=behaviour_logprobs)


def only_losses(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    return -current_logprobs * advantages


def detached(current_logprobs, **rest):
    return weighted(current_logprobs.detach(), **rest)


def overflowing(current_logprobs, **rest):
    policy_ratio = torch.exp(current_logprobs - rest["behaviour_logprobs"])
    part = weighted(current_logprobs, **rest)
    return replace(part, losses=-policy_ratio * rest["advantages"], weights=policy_ratio.detach())


def other_weights(current_logprobs, **rest):
    return replace(weighted(current_logprobs, **rest), weights=torch.ones_like(rest["advantages"]))


def weights_with_gradient(current_logprobs, **rest):
    weights = ratio(current_logprobs, other_logprobs=rest["behaviour_logprobs"])
    return replace(weighted(current_logprobs, **rest), weights=weights)


def wrong_sign(current_logprobs, **rest):
    part = weighted(current_logprobs, **rest)
    return replace(part, losses=-part.losses, weights=-part.weights)


def averaged(current_logprobs, **rest):
    part = weighted(current_logprobs, **rest)
    num = max(len(rest["advantages"]), 1)
    return replace(part, losses=part.losses / num, weights=part.weights / num)


def fails_without_tokens(current_logprobs, **rest):
    rest["advantages"].max()
    return weighted(current_logprobs, **rest)


def plain(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    """REINFORCE: right on policy only."""
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(losses=-current_logprobs * advantages, weights=torch.ones_like(advantages), held_back=none)


def capped(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    """CISPO: it never stops pushing a token."""
    weights = ratio(current_logprobs.detach(), other_logprobs=behaviour_logprobs).clamp(max=5)
    return Surrogate(losses=-weights * current_logprobs * advantages, weights=weights, held_back=weights == 5)


def one_number(current_logprobs, **rest):
    part = plain(current_logprobs, **rest)
    return replace(part, losses=part.losses.sum())


def neutral(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    """No mistake: the correction `none`."""
    none = torch.zeros_like(advantages, dtype=torch.bool)
    return Correction(weights=torch.ones_like(advantages), masked=none)


def inverted(current_logprobs, **rest):
    return replace(neutral(current_logprobs, **rest), weights=torch.exp(rest["behaviour_logprobs"] - current_logprobs))


def a_surrogate(current_logprobs, *, behaviour_logprobs, advantages, sequences):
    return plain(current_logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages, sequences=sequences)


def untraining(current_logprobs, **rest):
    part = neutral(current_logprobs, **rest)
    return replace(part, weights=-part.weights)


def relative(current_logprobs, **rest):
    weights = ratio(current_logprobs, other_logprobs=rest["behaviour_logprobs"])
    return replace(neutral(current_logprobs, **rest), weights=weights / weights.sum())


def long_mask(current_logprobs, **rest):
    """Bounds a token's weight in a sequence of two, not in one of a thousand."""
    masked = rest["sequences"].means((current_logprobs - rest["behaviour_logprobs"]).abs()) > 0.5
    return replace(neutral(current_logprobs, **rest), masked=masked)


class Deaf:
    instructions = ""

    def write(self, action):
        return f"do {action}"

    def parse(self, completion):
        raise RuntimeError("I hear nothing")


class Forgetful(Deaf):
    def parse(self, completion):
        from slipstream.common.text.action_format import ParsedAction

        return ParsedAction(text=completion, valid=True)
