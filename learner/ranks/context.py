"""Context parallelism: several ranks compute each micro-batch together, for sequences that one rank cannot hold.

Each computes a share of the pack's tokens through all layers. Only attention needs the others' tokens: before it, an
all-to-all exchanges shares of the tokens with all heads for all tokens with a share of the heads, and after it back.
DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509

Losses, metrics and advantages are of whole packs: every rank gets the results for all loss tokens, and the same loss.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The ranks that compute each micro-batch together, and this one's place among them."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup

    def own_heads(
        self, packed: Float[Tensor, "1 heads share head_dim"], *, num_tokens: int
    ) -> Float[Tensor, "1 own_heads tokens head_dim"]:
        """This rank's heads of every token, in exchange for every head of its tokens.

        Fewer heads of keys than ranks are repeated, so that every rank has the one that its queries attend to.
        """
        _, heads, share, head_dim = packed.shape
        if heads < self.num_ranks:
            packed = packed.repeat_interleave(self.num_ranks // heads, dim=1)
        parts = packed[0].transpose(0, 1).reshape(share, self.num_ranks, -1, head_dim).transpose(0, 1)
        return self._exchanged(parts).flatten(0, 1)[:num_tokens].transpose(0, 1)[None]

    def own_tokens(
        self, attended: Float[Tensor, "1 tokens own_heads value_dim"]
    ) -> Float[Tensor, "1 share heads value_dim"]:
        """Every head of this rank's tokens, in exchange for its heads of every token."""
        padding = -attended.shape[1] % self.num_ranks
        padded = F.pad(attended[0], (0, 0, 0, 0, 0, padding))
        parts = padded.reshape(self.num_ranks, -1, *padded.shape[1:])
        return self._exchanged(parts).transpose(0, 1).flatten(1, 2)[None]

    def _exchanged(self, parts: Float[Tensor, "ranks ..."]) -> Float[Tensor, "ranks ..."]:
        """What each rank had for this one, where `parts` has what this one has for each."""
        found: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStates:
    """The states that this rank computes, of those that something is predicted from for each loss token of a pack."""

    places: Int[Tensor, " own"]  # among the states that this rank computes
    own: Int[Tensor, " own"] | None  # the loss tokens that they are for; None: all
    num_loss_tokens: int
    context: Context | None

    def among_own(self, of_loss_tokens: Tensor) -> Tensor:
        """Those of one number, or row, for each loss token that belong to this rank."""
        return of_loss_tokens if self.own is None else of_loss_tokens[self.own]

    def of_all_ranks(self, of_own: Float[Tensor, " own"]) -> Float[Tensor, " loss_tokens"]:
        """The number of every loss token, on every rank of the context."""
        if self.context is None:
            return of_own
        found: Tensor = _Gather.apply(of_own, self.own, self.num_loss_tokens, self.context.group)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's share of a pack: as many of the computed tokens, in their order, as every other rank has.

    Where their number is no multiple of the ranks, copies of the last token follow, which nothing depends on.
    """

    context: Context
    tokens: Int[Tensor, " share"]  # their positions in the pack
    # On the host, so that it need not wait for a GPU to know how many loss tokens are predicted here.
    places: Int[np.ndarray, " tokens"]  # of each token of the pack among the computed
    loss_positions: Int[np.ndarray, " loss_tokens"]

    def loss_states(self, *, before: int) -> LossStates:
        """See `Packed.loss_states`."""
        places = self.places[self.loss_positions - before] - self.context.rank * len(self.tokens)
        own = np.flatnonzero((places >= 0) & (places < len(self.tokens)))
        return LossStates(
            places=on_device(torch.from_numpy(places[own]), self.tokens.device),
            own=on_device(torch.from_numpy(own), self.tokens.device),
            num_loss_tokens=len(places),
            context=self.context,
        )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host on `device`. The host does not wait for a GPU: it copies from pinned memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class _Exchange(torch.autograd.Function):
    """An all-to-all; its gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    """Every rank's numbers at their places.

    All ranks compute the same loss from them, and so have the same gradient. Each takes back only that of its own
    numbers: a token is trained once, by the rank that computed it.
    """

    @staticmethod
    def forward(ctx: Any, of_own: Tensor, own: Tensor, num_loss_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        found = of_own.new_zeros(num_loss_tokens)
        found[own] = of_own
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None
