"""Log-probabilities of loss tokens, without a tensor of [tokens, vocabulary]."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

from learner.context import LossStates
from learner.pack import Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """The output of the policy for each loss token, in the order of the pack."""

    logprobs: Float[Tensor, " loss_tokens"]  # with gradient
    entropies: Float[Tensor, " loss_tokens"]  # nats; with gradient only if requested
    values: Float[Tensor, " loss_tokens"] | None = None  # of a critic that shares the trunk; with gradient


# FSDP looks for the tensors of a module's output, to gather weights before its backward pass. Some versions of PyTorch,
# such as 2.11, find them only in registered types, and otherwise train nothing. No public function does this without
# the import of torch.export, which takes a second.
register_dataclass(TokenLogprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What this rank predicts: all loss tokens of a pack, or of a pack that several ranks compute its own."""

    states: Float[Tensor, "own hidden"]  # that predict them
    targets: Int[Tensor, " own"]
    of: LossStates


def predictions(hidden: Float[Tensor, "computed hidden"], packed: Packed) -> Predictions:
    """The hidden states that predict the loss tokens, and those tokens. This is the only place that shifts by one.

    The state after token i - 1 predicts token i. The first token of a sequence is never a loss token (`sequences_of`
    ensures it), so the state before a loss token is always of the same sequence. Tokens that are not trained are left
    out here, and cost no logits. The last state of a shared prefix predicts a token of every sequence that has it.
    """
    of = packed.loss_states(before=1)
    return Predictions(states=hidden[of.places], targets=packed.tokens[of.among_own(packed.loss_positions)], of=of)


def chunked_logprobs(
    hidden: Float[Tensor, "loss_tokens hidden"],
    head_weight: Float[Tensor, "vocab hidden"],
    head_bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, " loss_tokens"],
    *,
    kept: Int[Tensor, "loss_tokens width"] | None = None,
    has_kept: Bool[Tensor, " loss_tokens"] | None = None,
    temperature: Float[Tensor, " loss_tokens"] | float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probability of each target, and the entropy, under softmax(logits / temperature).

        logits[i] = head_weight @ hidden[i] + head_bias        in float32
        logprob[i] = logits[i, target[i]] / T - log(sum(exp(logits[i] / T)))

    Actors record the log-probability after temperature, so logits are divided by it here as well; `temperature` is one
    for all targets or one for each. Logits exist for
    `chunk_tokens` tokens at a time; the backward pass recomputes those of all chunks but the last. Two tokens with
    logits (ln 3, 0) have probabilities (3/4, 1/4) at T = 1, and (0.634, 0.366) at T = 2. `entropy_gradient` costs one
    more tensor of [chunk_tokens, vocab] in the backward pass.

    `kept` has the ids that each target was sampled from, padded with -1, including the target. Then both results are of
    the softmax over these ids only, as with top-k and top-p: a token that could not be sampled has no probability here
    either. Of three tokens with logits (ln 3, 0, 0), with the first two kept, the first has 3/4. Targets without
    `has_kept` were sampled from the whole vocabulary; None means that all have kept ids.

    Raises ValueError unless `temperature` > 0: a greedy policy has no log-probabilities to train on.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; only sampled trajectories can be trained on")
    # At least float32: bfloat16 logits are wrong in the second digit.
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    weight, bias = head_weight.to(dtype), None if head_bias is None else head_bias.to(dtype)
    logprobs, entropies = [], []
    # At least one chunk, even an empty one: the backward pass of every rank must reach the head, or the sizes of FSDP's
    # collectives would differ.
    last_start = max(0, len(targets) - 1) // chunk_tokens * chunk_tokens
    for start in range(0, last_start + 1, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        # The backward pass begins with the last chunk, so to drop its logits would save nothing.
        run = _logprobs if start == last_start else _recomputed_logprobs
        chunk_kept = None if kept is None else kept[chunk]
        chunk_has_kept = None if has_kept is None else has_kept[chunk]
        chunk_temperature = temperature[chunk, None] if isinstance(temperature, Tensor) else temperature
        chunk_logprobs, chunk_entropies = run(
            hidden[chunk], weight, bias, targets[chunk], chunk_kept, chunk_has_kept, chunk_temperature, entropy_gradient
        )
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropies)
    return TokenLogprobs(logprobs=torch.cat(logprobs), entropies=torch.cat(entropies))


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor | None,
    has_kept: Tensor | None,
    temperature: Tensor | float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    states = hidden.to(weight.dtype)
    if hidden.dtype == torch.bfloat16:
        logits = product_of_bfloat16(states, weight)
        logits = (logits if bias is None else logits + bias).div_(temperature)
    else:  # divide the states, not the logits: they are smaller
        logits = F.linear(states / temperature, weight)
        logits = logits if bias is None else logits + bias / temperature
    of_targets = logits.gather(1, targets[:, None]).squeeze(1)
    if kept is None:
        normaliser, entropies = _softmax_sums(logits, None, entropy_gradient)
        return of_targets - normaliser, entropies
    absent = kept < 0
    if has_kept is not None:
        absent = absent & has_kept[:, None]  # a row without any finite logit would have gradients of NaN
    kept_logits = logits.gather(1, kept.clamp(min=0).long()).masked_fill(absent, -math.inf)
    normaliser, entropies = _softmax_sums(kept_logits, absent, entropy_gradient)
    if has_kept is not None:
        of_whole, entropies_of_whole = _softmax_sums(logits, None, entropy_gradient)
        normaliser = torch.where(has_kept, normaliser, of_whole)
        entropies = torch.where(has_kept, entropies, entropies_of_whole)
    return of_targets - normaliser, entropies


def _softmax_sums(logits: Tensor, absent: Tensor | None, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials, and the entropy of its softmax; `absent` logits are -inf."""
    normaliser = logits.logsumexp(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = log Z - sum(p * logit)
        probabilities = (logits - normaliser[:, None]).exp()
        finite = logits if absent is None else logits.masked_fill(absent, 0.0)  # 0 * -inf would be NaN
        entropies = normaliser - (probabilities * finite).sum(dim=-1)
    return normaliser, entropies


_recomputed_logprobs = partial(checkpoint, _logprobs, use_reentrant=False, preserve_rng_state=False)


def product_of_bfloat16(
    states: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "vocab hidden"]
) -> Float[Tensor, "tokens vocab"]:
    """`states @ weight.T` of float32 tensors whose numbers are bfloat16: as exact as in float32, but with tensor cores.

    A GPU's TF32 rounds the factors to 10 bits. Those of bfloat16 have 7, so nothing is lost, and sums are in float32.
    In the backward pass the gradient of the logits is rounded to 10 bits.
    """
    product: Tensor = _Product.apply(states, weight)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        with _tf32():
            return states @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        with _tf32():
            return (
                gradient @ weight if ctx.needs_input_grad[0] else None,
                gradient.T @ states if ctx.needs_input_grad[1] else None,
            )


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Let float32 products on a GPU use TF32 within the block: other products, such as merged adapters, must not."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
