"""The probe of a published version: some tokens with the learner's log-probabilities, which the engine must find too.

Hashes show that the bytes arrived. Only the probe shows that the engine computes with them what the learner does: it
finds a tensor that a loader left out or put elsewhere, a buffer that no folder holds, and a model that the two sides
compute differently.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_PROBE_TOKENS = 96  # beyond the windows of small models, and enough to reach most experts; one prompt of an engine
# Nats, of the mean over the tokens; a single one may differ by WORST_TIMES as much. About ten times what right weights
# were measured to differ by in bfloat16 (docs/weights.md): both sides round the output of each layer, and of two
# experts that are nearly as good each side may choose another.
TOLERANCES = {"float32": 0.002, "bfloat16": 0.3}
WORST_TIMES = 10.0
# Nearer to the last version's scores than this share of the difference: they are those of its weights.
STALE_SHARE = 0.1

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], msgspec.Meta(min_length=2, max_length=MAX_PROBE_TOKENS)]
Logprobs = Annotated[list[float], msgspec.Meta(min_length=1, max_length=MAX_PROBE_TOKENS - 1)]


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sequence of tokens, and what the published weights make of it."""

    tokens: Tokens
    logprobs: Logprobs  # of tokens[1:], at temperature 1, over the whole vocabulary
    tolerance: float  # nats: the engine's may differ by this much in the mean, and by WORST_TIMES as much in one token


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The absolute difference at each token, in nats. Infinite where one is not a number, or where one is missing."""
    if len(one) != len(other):
        return [float("inf")]
    found = [abs(left - right) for left, right in zip(one, other, strict=True)]
    return [float("inf") if math.isnan(nats) else nats for nats in found]


def mismatch(probe: Probe, found: Sequence[float], *, former: Sequence[float] = ()) -> str | None:
    """How the engine's scores `found` differ from those in `probe`, and what that suggests; None if they agree.

    `former` are its scores of the version before, empty if there are none.
    """
    nats = differences(probe.logprobs, found)
    mean, worst = sum(nats) / len(nats), max(nats)
    if mean <= probe.tolerance and worst <= WORST_TIMES * probe.tolerance:
        return None
    wrong = [place for place, each in enumerate(nats, start=1) if each > probe.tolerance]
    return (
        f"the engine's log-probabilities differ from the learner's by {mean:.3g} nats a token, by {worst:.3g} at most "
        f"(allowed: {probe.tolerance:g} and {WORST_TIMES * probe.tolerance:g}); {_suspects(wrong, nats, found, former)}"
    )


def _suspects(wrong: list[int], nats: list[float], found: Sequence[float], former: Sequence[float]) -> str:
    apart = differences(found, former)
    if not math.isfinite(sum(nats)):
        return "some are not finite numbers: suspect the training, or a kernel of the engine"
    if sum(apart) / len(apart) < STALE_SHARE * sum(nats) / len(nats):
        return "they are still those of the version before: the engine computes with old weights"
    if wrong[:1] > [1]:
        return (
            f"the first {wrong[0] - 1} of {len(nats)} tokens agree: suspect what only later tokens show, such as "
            "rotary positions, a sliding window or one expert"
        )
    return f"{len(wrong)} of {len(nats)} tokens differ, from the first on: suspect a weight or a buffer of every token"
