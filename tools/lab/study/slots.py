"""Attention over slots that cache keys and values, and a choice of tokens by given random numbers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Cached keys and values of each slot, for each layer."""

    keys: list[Float[Tensor, "slots max_tokens kv_heads head_dim"]]
    values: list[Float[Tensor, "slots max_tokens kv_heads head_dim"]]


def empty_slots(num_slots: int, *, num_layers: int, kv_heads: int, max_tokens: int, head_dim: int) -> Slots:
    shape = (num_slots, max_tokens, kv_heads, head_dim)
    keys, values = ([torch.zeros(shape) for _ in range(num_layers)] for _ in range(2))
    return Slots(keys=keys, values=values)


class Reading:
    """The places in the slots of new tokens, which are concatenated in one row; the same for every layer."""

    def __init__(self, slots: Slots, slot_ids: list[int], starts: list[int], lengths: list[int]) -> None:
        """Piece i has `lengths[i]` tokens, from position `starts[i]` of slot `slot_ids[i]`; slots must be distinct."""
        self.slots = slots
        of_each = torch.tensor(lengths)
        self.rows = torch.tensor(slot_ids).repeat_interleave(of_each)
        self.columns = torch.cat([torch.arange(length) for length in lengths])
        self.positions = self.columns + torch.tensor(starts).repeat_interleave(of_each)
        self.last = of_each.cumsum(0) - 1  # the last token of each piece
        num_slots, widest = len(slots.keys[0]), max(lengths)
        places = torch.zeros(num_slots, widest, dtype=torch.long)
        places[self.rows, self.columns] = self.positions
        past = torch.arange(int(self.positions.max()) + 1)
        # Added to the scores: -inf where a key comes after the token that attends.
        self.unseen = torch.zeros(num_slots, 1, widest, len(past)).masked_fill_(
            (past > places[:, :, None])[:, None], -torch.inf
        )


def slot_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads new head_dim"],
    key: Float[Tensor, "1 kv_heads new head_dim"],
    value: Float[Tensor, "1 kv_heads new head_dim"],
    attention_mask: None,
    *,
    reading: Reading,
    scaling: float,
    **_: object,
) -> tuple[Float[Tensor, "1 new heads head_dim"], None]:
    """The attention function that a Hugging Face model calls in each layer; the signature is transformers'."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    rows, columns = reading.rows, reading.columns
    keys, values = reading.slots.keys[layer], reading.slots.values[layer]
    keys[rows, reading.positions] = key[0].transpose(0, 1)
    values[rows, reading.positions] = value[0].transpose(0, 1)
    num_slots, (widest, longest) = len(reading.unseen), reading.unseen.shape[2:]
    queries = query.new_zeros(num_slots, widest, query.shape[1], query.shape[3])
    queries[rows, columns] = query[0].transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys[:, :longest].transpose(1, 2),
        values[:, :longest].transpose(1, 2),
        attn_mask=reading.unseen,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)[rows, columns][None], None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One token per row."""

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]


def choose(logits: Float[Tensor, "rows vocab"], chances: Float[Tensor, " rows"]) -> Chosen:
    """Choose the token of each row whose interval contains the row's chance; softmax(logits) divides [0, 1) in order.

    With logits (0, ln 3), the parts are [0, 1/4) and [1/4, 1): chances 0.2 and 0.3 choose tokens 0 and 1.
    """
    logprobs = logits.log_softmax(dim=-1)
    ends = logprobs.double().exp().cumsum(dim=-1)
    tokens = torch.searchsorted(ends, chances[:, None] * ends[:, -1:], right=True)
    return Chosen(tokens=tokens.squeeze(1), logprobs=logprobs.gather(1, tokens).squeeze(1))
