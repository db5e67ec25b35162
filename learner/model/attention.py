"""Attention over a packed row in which no sequence sees another, exact and without a [tokens, tokens] mask.

On a CPU each sequence is attended to by itself, in place. Elsewhere, and with a sliding window, sequences of like
length that lie side by side are the rows of one small batch: a row's padding comes after its tokens, and attention is
causal, so no token ever sees it. Every other layer works on the packed row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

# A sequence joins a batch of longer ones if it is at least this fraction as long as the longest: less padding against
# fewer kernels. With 64 sequences of 60 to 180 tokens, 0.6 took about 10 % longer and 0.8 to 0.95 were alike.
MIN_LENGTH_RATIO = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Consecutive sequences of a pack that are attended to as one batch of [len(lengths), longest]."""

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def equal(self) -> bool:
        return min(self.lengths) == self.longest


def rows_of(lengths: Sequence[int]) -> tuple[Rows, ...]:
    """Group consecutive sequences of like length; `pack` sorts by length, which makes the groups few.

    >>> [row.lengths for row in rows_of([10, 9, 8, 7, 2])]
    [(10, 9, 8), (7,), (2,)]
    """
    groups: list[list[int]] = []
    for length in lengths:
        if groups and min(length, *groups[-1]) >= MIN_LENGTH_RATIO * max(length, *groups[-1]):
            groups[-1].append(length)
        else:
            groups.append([length])
    return tuple(Rows(lengths=tuple(group)) for group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRows:
    """All rows of a pack, on their way through the layers.

    As a bare tuple torch.compile would look at its length, and make the layers' code anew for each number of rows.
    """

    rows: tuple[Rows, ...]


@torch.compiler.disable(reason="it splits the pack at other places each time")  # type: ignore[no-untyped-call, untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens head_dim"],
    attention_mask: None,
    *,
    rows: PackRows,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Float[Tensor, "1 tokens heads head_dim"], None]:
    """The attention function that a Hugging Face model calls in each layer; the signature is transformers'.

    `rows` comes from the caller of the model. What else transformers passes (position_ids, dropout and the like) has
    no part here: positions are in `query` and `key` already, and dropout would make the log-probabilities random.
    """
    lengths = [length for row in rows.rows for length in row.lengths]
    if query.device.type == "cpu" and (sliding_window is None or sliding_window >= max(lengths)):
        return _one_by_one(query, key, value, lengths, scaling), None
    # Split, not sliced: the backward pass of a slice fills zeros as long as the whole pack.
    sizes = [row.num_tokens for row in rows.rows]
    parts = [torch.split_with_sizes(packed[0], sizes, dim=1) for packed in (query, key, value)]
    attended = [
        _attend(_batched(queries, row), _batched(keys, row), _batched(values, row), row, scaling, sliding_window)
        for queries, keys, values, row in zip(*parts, rows.rows, strict=True)
    ]
    return torch.cat(attended)[None], None


def _one_by_one(
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens head_dim"],
    lengths: list[int],
    scaling: float,
) -> Float[Tensor, "1 tokens heads head_dim"]:
    # Split and joined where a sequence is one stretch of memory, as the projections before and behind it have it: along
    # the other axis, the gradients of the parts would be joined by strided copies.
    parts = (torch.split_with_sizes(packed.transpose(1, 2), lengths, dim=1) for packed in (query, key, value))
    attended = [
        F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for queries, keys, values in zip(*parts, strict=True)
    ]
    return torch.cat(attended, dim=1)


def _batched(packed: Float[Tensor, "heads tokens head_dim"], row: Rows) -> Float[Tensor, "rows heads longest head_dim"]:
    heads, _, head_dim = packed.shape
    if row.equal:
        return packed.view(heads, len(row.lengths), row.longest, head_dim).transpose(0, 1)
    sequences = torch.split_with_sizes(packed.transpose(0, 1), row.lengths)
    return nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).transpose(1, 2)


def _attend(
    query: Float[Tensor, "rows heads longest head_dim"],
    key: Float[Tensor, "rows kv_heads longest head_dim"],
    value: Float[Tensor, "rows kv_heads longest head_dim"],
    row: Rows,
    scaling: float,
    sliding_window: int | None,
) -> Float[Tensor, "tokens heads head_dim"]:
    window = None if sliding_window is None or sliding_window >= row.longest else sliding_window
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if window is None else _window_mask(row.longest, window, query.device),
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)
    if row.equal:
        return attended.flatten(0, 1)
    return torch.cat([tokens[:length] for tokens, length in zip(attended, row.lengths, strict=True)])


def _window_mask(longest: int, window: int, device: torch.device) -> Bool[Tensor, "longest longest"]:
    """True where a token may look: at itself and the `window - 1` tokens before it."""
    position = torch.arange(longest, device=device)
    behind = position[:, None] - position[None, :]
    return (behind >= 0) & (behind < window)
