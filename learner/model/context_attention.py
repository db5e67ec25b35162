"""Attention of a pack that several ranks compute together: each has some of the tokens, and computes some heads."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import Packed, TokenSequence, pack
from slipstream.learner.model.attention import CannotPack, PackRows, packed_attention
from slipstream.learner.ranks.ranks import Ranks

MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.1}  # of the states after all layers, relative, in the mean over tokens


@torch.compiler.disable(reason="it splits each pack at different places")  # type: ignore[no-untyped-call, untyped-decorator]
def attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads share head_dim"],
    key: Float[Tensor, "1 kv_heads share head_dim"],
    value: Float[Tensor, "1 kv_heads share value_dim"],
    attention_mask: Tensor | None,
    *,
    rows: PackRows | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **others: object,
) -> tuple[Float[Tensor, "1 share heads value_dim"], None]:
    """`packed_attention`, of which a rank with a share of the tokens computes a share of the heads for all tokens."""
    if rows is None or rows.context is None:
        attended, _ = packed_attention(module, query, key, value, attention_mask, rows=rows, s_aux=s_aux, **others)
        return attended, None
    context, num_tokens = rows.context, sum(row.num_tokens for row in rows.rows)
    check_heads(query.shape[1], key.shape[1], context.num_ranks)  # layers may differ
    query, key, value = (context.own_heads(each, num_tokens=num_tokens) for each in (query, key, value))
    if s_aux is not None:
        s_aux = s_aux.view(context.num_ranks, -1)[context.rank]
    alone = dataclasses.replace(rows, context=None)
    attended, _ = packed_attention(module, query, key, value, attention_mask, rows=alone, s_aux=s_aux, **others)
    return context.own_tokens(attended), None


@torch.no_grad()
def check_context(
    forward: Callable[[Packed], object], decoder: nn.Module, *, vocab_size: int, dtype: str, ranks: Ranks
) -> None:
    """Raise ConfigError, on every rank, unless ranks compute the states of a short pack together as each does alone.

    This detects layers other than attention that look at other tokens. `forward` calls the `decoder`. Collective.
    """
    assert ranks.context is not None
    states: list[Tensor] = []
    hook = decoder.register_forward_hook(lambda _module, _inputs, output: states.append(output.last_hidden_state[0]))
    # No multiple of the ranks, and enough that each has some.
    lengths = (5 * ranks.context.num_ranks, 3 * ranks.context.num_ranks - 1)
    sequences = [
        TokenSequence.bare(np.arange(1, length + 1) * 7919 % vocab_size, np.arange(length) > 0) for length in lengths
    ]
    together = pack(sequences, context=ranks.context)
    assert together.share is not None
    for packed in (pack(sequences), together):
        forward(packed.to(ranks.device))
    hook.remove()
    alone = states[0][ranks.context.rank * len(states[1]) :][: len(states[1])].float()  # without copies at the end
    error = ((states[1][: len(alone)].float() - alone).norm(dim=-1) / alone.norm(dim=-1)).mean()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if not float(error) <= MAX_ERROR[dtype]:
        raise ConfigError(
            f"`learner.context_ranks` must be 1 for this model, got {ranks.context.num_ranks}: the states that these "
            f"ranks compute together differ from those that each computes alone, by a fraction of {float(error):.2g}"
        )


def check_heads(num_heads: int, num_kv_heads: int, context_ranks: int) -> None:
    """Raise CannotPack unless `context_ranks` can have equal shares of the heads, each with the keys that it needs."""
    if _shares(num_heads, num_kv_heads, context_ranks):
        return
    fitting = [str(ranks) for ranks in range(1, num_heads + 1) if _shares(num_heads, num_kv_heads, ranks)]
    raise CannotPack(
        f"`learner.context_ranks` must divide its {num_heads} attention heads, and divide its {num_kv_heads} "
        f"key-value heads or be a multiple of them, got {context_ranks}; use {', '.join(fitting)}"
    )


def _shares(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)
