"""Log-probabilities of loss tokens, without a tensor of [tokens, vocabulary]."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass

from slipstream.learner.batch.pack import Packed
from slipstream.learner.ranks.context import LossStates

ABSENT = -1e30  # a logit whose probability is 0, and finite: 0 * -inf would be NaN


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
    absent: Int[Tensor, " ids"] | None = None,
    temperature: Float[Tensor, " loss_tokens"] | float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probability of each target, and the entropy, under softmax(logits / temperature).

        logits[i] = head_weight @ hidden[i] + head_bias        in float32
        logprob[i] = logits[i, target[i]] / T - log(sum(exp(logits[i] / T)))

    Actors record the log-probability after temperature, so logits are divided by it here as well; `temperature` is one
    for all targets or one for each. Logits exist for `chunk_tokens` tokens at a time; the backward pass recomputes
    those of all chunks but the last. Two tokens with logits (ln 3, 0) have probabilities (3/4, 1/4) at T = 1, and
    (0.634, 0.366) at T = 2. `entropy_gradient` costs one more tensor of [chunk_tokens, vocab] in the backward pass.

    `kept` has the ids that each target was sampled from, padded with -1, including the target. Then both results are of
    the softmax over these ids only, as with top-k and top-p: a token that could not be sampled has no probability here
    either. Of three tokens with logits (ln 3, 0, 0), with the first two kept, the first has 3/4. Targets without
    `has_kept` were sampled from the whole vocabulary; None means that all have kept ids. The ids `absent` could not be
    sampled either: they have no probability, and their rows no gradient.

    Raises ValueError unless `temperature` > 0: a greedy policy has no log-probabilities to train on.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; only sampled trajectories can be trained on")
    sampled = _Sampled(targets=targets, kept=kept, has_kept=has_kept, absent=absent, temperature=temperature)
    logprobs, entropies = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, head_bias, sampled, chunk_tokens, entropy_gradient
    )
    return TokenLogprobs(logprobs=logprobs, entropies=entropies)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampled:
    """The sampled tokens, and from what each was sampled: see `chunked_logprobs`."""

    targets: Int[Tensor, " tokens"]
    kept: Int[Tensor, "tokens width"] | None
    has_kept: Bool[Tensor, " tokens"] | None
    absent: Int[Tensor, " ids"] | None
    temperature: Float[Tensor, " tokens"] | float

    def part(self, chunk: slice) -> "_Sampled":
        kept, has_kept, temperature = self.kept, self.has_kept, self.temperature
        return _Sampled(
            targets=self.targets[chunk],
            kept=None if kept is None else kept[chunk],
            has_kept=None if has_kept is None else has_kept[chunk],
            absent=self.absent,
            temperature=temperature[chunk] if isinstance(temperature, Tensor) else temperature,
        )


class _Logprobs(torch.autograd.Function):
    """`chunked_logprobs`, with its derivative written out, which takes fewer passes over the logits than autograd.

    d logprob / d logit[j] = (1[j = target] - p[j]) / T
    d entropy / d logit[j] = -p[j] * (log p[j] + entropy) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sampled: _Sampled,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        found = []
        for chunk in _chunks(hidden, chunk_tokens):
            part = sampled.part(chunk)
            logits = _logits(hidden[chunk], weight, bias, part)
            found.append(_of_chunk(logits, part))
        logprobs, entropies = (torch.cat(each) for each in zip(*found, strict=True))
        # The backward pass begins with the last chunk, so to drop its logits would save nothing.
        ctx.save_for_backward(hidden, weight, bias, logits)
        ctx.sampled, ctx.chunk_tokens, ctx.entropy_gradient = sampled, chunk_tokens, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, logits = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = weight.new_zeros(weight.shape, dtype=logits.dtype) if ctx.needs_input_grad[1] else None
        of_bias = logits.new_zeros(logits.shape[1]) if ctx.needs_input_grad[2] else None
        for chunk in reversed(_chunks(hidden, ctx.chunk_tokens)):
            part = ctx.sampled.part(chunk)
            if logits is None:
                logits = _logits(hidden[chunk], weight, bias, part)
            entropy_part = of_entropies[chunk] if ctx.entropy_gradient else None
            gradient = _gradient(logits, part, of_logprobs[chunk], entropy_part)
            logits = None
            if of_bias is not None:
                of_bias += gradient.sum(dim=0)
            # The gradients that are computed from it have this dtype too.
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = _product(gradient, weight)
            if of_weight is not None:
                of_weight += _product(gradient.T, hidden[chunk])
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


def _chunks(hidden: Tensor, chunk_tokens: int) -> list[slice]:
    """Parts of the tokens: at least one, even an empty one.

    The backward pass of every rank must reach the head, or the sizes of FSDP's collectives would differ.
    """
    return [slice(start, start + chunk_tokens) for start in range(0, max(1, len(hidden)), chunk_tokens)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, sampled: _Sampled) -> Tensor:
    logits, temperature = _product(hidden, weight.T), sampled.temperature
    if bias is not None:
        logits += bias
    if sampled.absent is not None:
        logits.index_fill_(1, sampled.absent, ABSENT)
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[:, None])
    return logits if temperature == 1 else logits.div_(temperature)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in at least float32: bfloat16 logits are wrong in the second digit.

    A GPU's tensor cores multiply bfloat16 numbers exactly, and add in float32.
    """
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return left.to(dtype) @ right.to(dtype)


def _of_chunk(logits: Tensor, sampled: _Sampled) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token of a chunk."""
    if sampled.kept is None:
        return _of_whole(logits, sampled.targets)
    of_kept = _of_kept(logits, sampled.targets, _kept_logits(logits, sampled))
    if sampled.has_kept is None:
        return of_kept
    both = zip(of_kept, _of_whole(logits, sampled.targets), strict=True)
    logprobs, entropies = (torch.where(sampled.has_kept, kept, whole) for kept, whole in both)
    return logprobs, entropies


def _of_whole(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    table = logits.log_softmax(dim=-1)
    return table.gather(1, targets[:, None]).squeeze(1), _entropies(table)


def _of_kept(logits: Tensor, targets: Tensor, kept_logits: Tensor) -> tuple[Tensor, Tensor]:
    of_targets = logits.gather(1, targets[:, None]).squeeze(1)
    return of_targets - kept_logits.logsumexp(dim=-1), _entropies(kept_logits.log_softmax(dim=-1))


def _kept_logits(logits: Tensor, sampled: _Sampled) -> Tensor:
    """The logit of each kept id, and ABSENT as padding. A row without kept ids has finite numbers of no meaning."""
    assert sampled.kept is not None
    absent = sampled.kept < 0
    if sampled.has_kept is not None:
        absent = absent & sampled.has_kept[:, None]
    return logits.gather(1, _ids(sampled.kept)).masked_fill(absent, ABSENT)


def _ids(kept: Tensor) -> Tensor:
    return kept.clamp(min=0).long()


def _entropies(table: Float[Tensor, "tokens words"]) -> Float[Tensor, " tokens"]:
    """Of the distributions whose log-probabilities are in the rows of `table`."""
    return -table.exp().mul_(table).sum(dim=-1)


def _gradient(
    logits: Float[Tensor, "tokens vocab"],
    sampled: _Sampled,
    of_logprobs: Float[Tensor, " tokens"],
    of_entropies: Float[Tensor, " tokens"] | None,
) -> Float[Tensor, "tokens vocab"]:
    """The gradient of the logits before temperature; `of_entropies` is None if entropies need none."""
    upstream = torch.stack([of_logprobs] if of_entropies is None else [of_logprobs, of_entropies])
    upstream = upstream / sampled.temperature
    if sampled.kept is None:
        gradient = _softmax_gradient(logits, upstream)
    else:
        of_kept = upstream
        if sampled.has_kept is None:
            gradient = torch.zeros_like(logits)
        else:
            of_kept = upstream * sampled.has_kept
            gradient = _softmax_gradient(logits, upstream * ~sampled.has_kept)
        of_kept_logits = _softmax_gradient(_kept_logits(logits, sampled), of_kept)
        gradient.scatter_add_(1, _ids(sampled.kept), of_kept_logits)
    return gradient.scatter_add_(1, sampled.targets[:, None], upstream[0][:, None])


def _softmax_gradient(
    logits: Float[Tensor, "tokens words"], upstream: Float[Tensor, "kinds tokens"]
) -> Float[Tensor, "tokens words"]:
    """The gradient of logits in a softmax, but for what a log-probability's own logit gets: see `_Logprobs`."""
    of_logprobs = upstream[0][:, None]
    if len(upstream) == 1:
        return logits.softmax(dim=-1).mul_(-of_logprobs)
    table = logits.log_softmax(dim=-1)
    return table.exp().mul_(((table + _entropies(table)[:, None]) * upstream[1][:, None]).add_(of_logprobs)).neg_()
