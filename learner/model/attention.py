"""Attention over packed sequences: no sequence sees another, without a [tokens, tokens] mask.

In bfloat16 on a GPU, PyTorch's flash attention takes the whole pack. On a CPU, attention runs on one sequence after the
other, in place. In float32 on a GPU, and with a sliding window on a CPU, sequences of similar length that follow one
another become the rows of a small batch. The padding of a row comes after its tokens, and attention is causal, so no
token sees it. Every other layer works on the packed row.

If a prefix of several sequences is computed once, its keys and values are copied to each of them, and the queries of a
sequence are those of its other tokens, at its end. PyTorch's flash attention takes such sequences on a GPU, as does
attention of one sequence after the other on a CPU, with a mask of [queries, keys].

A sink (gpt-oss) is a further, learned score in the softmax of each head, without a value. Here it is a first key of
every sequence, with a mask of [queries, keys] on any device.

No kernel that makes a [tokens, tokens] matrix for each head ever runs on a GPU: with 32,768 tokens one takes 4 GiB.
"""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from slipstream.learner.batch.prefixes import prefixes_of
from slipstream.learner.ranks.context import Context

MAX_FLASH_HEAD_DIM = 256  # PyTorch's flash attention has no larger head, and none whose values have another size
# PyTorch 2.11's takes as many heads of keys as of queries: the keys are repeated for it.
FLASH_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
# A sequence joins a batch of longer ones if it has at least this fraction of the longest length: a trade-off between
# padding and number of kernels. With 64 sequences of 60 to 180 tokens, 0.6 took about 10 % longer than 0.8 to 0.95.
MIN_LENGTH_RATIO = 0.8
SINK_DIMS = 8  # that heads are wider with a sink: kernels of GPUs take multiples of 8
MAX_SHARED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of all numbers together, relative: see the check


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Consecutive sequences of a pack that form one batch of [len(lengths), longest] in attention."""

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

    def padded(self, packed: Float[Tensor, "tokens ..."]) -> Float[Tensor, "rows longest ..."]:
        """The sequences of `packed` as rows, with zeros after those that are shorter."""
        if self.equal:
            return packed.view(len(self.lengths), self.longest, *packed.shape[1:])
        return nn.utils.rnn.pad_sequence(list(torch.split_with_sizes(packed, self.lengths)), batch_first=True)

    def unpadded(self, rows: Float[Tensor, "rows longest ..."]) -> Float[Tensor, "tokens ..."]:
        """The tokens of the sequences alone, one sequence after the other."""
        if self.equal:
            return rows.flatten(0, 1)
        return torch.cat([tokens[:length] for tokens, length in zip(rows, self.lengths, strict=True)])


def rows_of(lengths: Sequence[int]) -> tuple[Rows, ...]:
    """Group consecutive sequences of similar length; `pack` sorts by length, so there are few groups.

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
class SharedKeys:
    """The keys that each sequence attends to, if sequences share them; its queries are at its end."""

    places: Int[Tensor, " keys"]  # of each sequence's keys, one sequence after the other, in the pack
    bounds: Int[Tensor, " bounds"]  # where the keys of each sequence begin among them, and where the last ones end
    lengths: tuple[int, ...]  # keys of each sequence


@dataclass(kw_only=True, slots=True)
class PackRows:
    """All rows of a pack, as passed through the layers; with `shared`, of its queries.

    torch.compile would check the length of a bare tuple, and PyTorch 2.11's that of one in a frozen dataclass, and
    compile the layers again for each number of rows.
    """

    rows: tuple[Rows, ...]
    shared: SharedKeys | None = None
    context: Context | None = None  # the ranks with the other tokens: see `slipstream.learner.model.context_attention`


class CannotPack(ValueError):
    """The model cannot read packed sequences; the message completes the sentence "it cannot be trained here: "."""


# Arguments of transformers that are not needed here: positions are already in `query` and `key`, there is no cache,
# dropout is 0 in evaluation mode, and keys have the bounds of queries or those in `rows`.
_WITHOUT_EFFECT = {
    "position_ids",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "dropout",
    "cu_seq_lens_k",
    "max_length_k",
}


@torch.compiler.disable(reason="it splits each pack at different places")  # type: ignore[no-untyped-call, untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens value_dim"],
    attention_mask: Tensor | None,
    *,
    rows: PackRows | None = None,
    cu_seq_lens_q: Int[Tensor, " bounds"] | None = None,
    max_length_q: int = 0,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Float[Tensor, "1 tokens heads value_dim"], None]:
    """The attention function that a Hugging Face model calls in each layer, with the signature of transformers.

    `rows`, and the same as `cu_seq_lens_q` and `max_length_q`, come from the caller of the model. Raises CannotPack for
    a model whose layers do not pass them on, or that needs a feature missing here, such as capped scores (`softcap`).
    `s_aux` are the sinks of the heads.
    """
    if rows is None:
        raise CannotPack("its layers do not pass the sequence bounds on to the attention")
    wanted = others | {"attention_mask": attention_mask, "is_causal": is_causal is False or None}
    unknown = sorted(name for name, value in wanted.items() if value is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise CannotPack(f"its attention needs {', '.join(unknown)}, which packed attention does not support")
    shared = rows.shared
    if shared is not None:
        key, value = _copied(key, shared.places), _copied(value, shared.places)
    if cu_seq_lens_q is not None and s_aux is None and flash_runs(query, value):
        key_bounds, max_key_length = (shared.bounds, max(shared.lengths)) if shared else (cu_seq_lens_q, max_length_q)
        bounds, longest = (cu_seq_lens_q, key_bounds), (max_length_q, max_key_length)
        return _flash(query, key, value, bounds, longest, scaling, sliding_window), None
    lengths = [length for row in rows.rows for length in row.lengths]
    if query.device.type == "cpu" and (shared or sliding_window is None or sliding_window >= max(lengths)):
        key_lengths = shared.lengths if shared else lengths
        return _one_by_one(query, key, value, lengths, key_lengths, scaling, sliding_window, s_aux), None
    if shared:
        sinks = "" if s_aux is None else " and has sinks"
        raise CannotPack(f"on {query.device.type} in {query.dtype}, no kernel takes keys that sequences share{sinks}")
    # Split, not sliced: the backward pass of a slice would fill zeros for the whole pack.
    sizes = [row.num_tokens for row in rows.rows]
    parts = [torch.split_with_sizes(packed[0].transpose(0, 1), sizes) for packed in (query, key, value)]
    of_rows = [
        _attend(row.padded(queries), row.padded(keys), row.padded(values), row, scaling, sliding_window, s_aux)
        for queries, keys, values, row in zip(*parts, rows.rows, strict=True)
    ]
    return torch.cat(of_rows)[None], None


def _flash(
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads keys head_dim"],
    value: Float[Tensor, "1 kv_heads keys value_dim"],
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float,
    sliding_window: int | None,
) -> Float[Tensor, "1 tokens heads value_dim"]:
    """Attend with PyTorch's flash attention; `bounds` and `longest` are of the queries' and of the keys' sequences."""
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before and after that a token sees
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1 and not FLASH_TAKES_GROUPS:
        key, value = (each.repeat_interleave(num_groups, dim=1) for each in (key, value))
    flash = partial(varlen_attn, enable_gqa=num_groups > 1) if FLASH_TAKES_GROUPS else varlen_attn
    attended = flash(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        *bounds,
        *longest,
        scale=scaling,
        window_size=window,
    )
    assert isinstance(attended, Tensor)  # without auxiliary outputs
    return attended[None]


def flash_runs(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash attention takes these tensors; their last dimension is that of a head."""
    sizes = (query.shape[-1], value.shape[-1])
    return query.device.type == "cuda" and query.dtype == torch.bfloat16 and sizes[0] == sizes[1] <= MAX_FLASH_HEAD_DIM


def _copied(
    packed: Float[Tensor, "1 kv_heads tokens head_dim"], places: Int[Tensor, " keys"]
) -> Float[Tensor, "1 kv_heads keys head_dim"]:
    """The keys or values at `places`."""
    _, heads, _, head_dim = packed.shape
    # A lookup, because its backward pass adds up the gradients of all copies in float32 on a GPU.
    rows = F.embedding(places, packed[0].transpose(0, 1).flatten(1))
    return rows.view(len(places), heads, head_dim).transpose(0, 1)[None]


def _one_by_one(
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads keys head_dim"],
    value: Float[Tensor, "1 kv_heads keys value_dim"],
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    scaling: float,
    sliding_window: int | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "1 tokens heads value_dim"]:
    # Split along the axis where a sequence is contiguous in memory, as in the projections before and after. Along the
    # other axis, the gradients of the parts would be joined by strided copies.
    parts = (
        torch.split_with_sizes(packed.transpose(1, 2), sizes, dim=1)
        for packed, sizes in ((query, lengths), (key, key_lengths), (value, key_lengths))
    )
    attended = []
    for queries, keys, values in zip(*parts, strict=True):
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        window = sliding_window if sliding_window and sliding_window < num_keys else None
        causal = window is None and num_queries == num_keys
        sees = None if causal else _sees(num_queries, num_keys, window, query.device)
        of_sequence = _scaled(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), sees, scaling, sinks
        )
        attended.append(of_sequence.transpose(1, 2))
    return torch.cat(attended, dim=1)


def _scaled(
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads keys head_dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    sees: Bool[Tensor, "queries keys"] | None,
    scaling: float,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """PyTorch's attention. `sees` is None if there are as many keys as queries, and every token sees those before it.

    With `sinks` there is a further key, before the others, that every query sees: see `_with_sink`.
    """
    value_dim = value.shape[-1]
    if sinks is not None:
        sees = _sees(query.shape[2], key.shape[2], None, query.device) if sees is None else sees
        sees = F.pad(sees, (1, 0), value=True)
        query, key, value = _with_sink(query, key, value, sinks / scaling)
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=sees,
        is_causal=sees is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended if sinks is None else attended[..., :value_dim]


def _with_sink(
    query: Float[Tensor, "rows heads queries head_dim"],
    key: Float[Tensor, "rows kv_heads keys head_dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    unscaled: Float[Tensor, " heads"],
) -> tuple[Tensor, Tensor, Tensor]:
    """All three with a first key whose product with each query of a head is `unscaled`, and whose value is 0.

    Queries have `unscaled` in a dimension of its own, where that key has 1 and the others 0. So the gradient of a sink
    passes through any kernel, and with fewer heads of keys the heads still have different sinks.
    """
    of_queries = F.pad(unscaled.to(query.dtype)[:, None, None], (0, SINK_DIMS - 1))
    query = torch.cat([query, of_queries.expand(*query.shape[:3], SINK_DIMS)], dim=-1)
    first = F.pad(key.new_ones(1), (key.shape[-1], SINK_DIMS - 1))
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), F.pad(key, (0, SINK_DIMS))], dim=2)
    return query, key, F.pad(value, (0, SINK_DIMS, 1, 0))


def _attend(
    query: Float[Tensor, "rows longest heads head_dim"],
    key: Float[Tensor, "rows longest kv_heads head_dim"],
    value: Float[Tensor, "rows longest kv_heads value_dim"],
    row: Rows,
    scaling: float,
    sliding_window: int | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "tokens heads value_dim"]:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    window = None if sliding_window is None or sliding_window >= row.longest else sliding_window
    on_gpu = query.device.type == "cuda"
    if on_gpu:  # the memory-efficient kernel takes as many heads of keys as of queries
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if on_gpu else contextlib.nullcontext():
        sees = None if window is None else _sees(row.longest, row.longest, window, query.device)
        return row.unpadded(_scaled(query, key, value, sees, scaling, sinks).transpose(1, 2))


def _sees(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Bool[Tensor, "num_queries num_keys"]:
    """True where a query may attend: to its own token, the last query's being the last key, and to those before it.

    With a `window` only to the `window - 1` tokens before it.
    """
    own = num_keys - num_queries  # the key of the first query's token
    sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(own)  # a byte for each pair
    return sees if window is None else sees.triu(own - window + 1)


@torch.enable_grad()  # frozen models are loaded without
def check_kernel(device: torch.device, dtype: torch.dtype, *, head_dim: int, with_sinks: bool = False) -> str:
    """Run the attention of a short pack forward and backward; return the name of the kernel that ran.

    Raises CannotPack if no kernel without a [tokens, tokens] matrix runs.
    """
    lengths = (5, 3)
    shape = (1, 2, sum(lengths), head_dim)
    query, key, value = (torch.ones(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    try:
        attended = _attended((query, key, value), PackRows(rows=rows_of(lengths)), bounds, with_sinks=with_sinks)
        torch.autograd.backward(attended.sum())
    except (RuntimeError, TypeError) as error:  # TypeError: another version's function has other parameters
        raise CannotPack(
            f"no kernel of PyTorch {torch.__version__} computes attention with heads of {head_dim} in {dtype} on "
            f"{device} ({' '.join(str(error).split())}); use bfloat16, or install flash-attn"
        ) from error
    if flash_runs(query, value) and not with_sinks:
        return "PyTorch's flash attention, for the whole pack"
    if device.type == "cuda":
        of_what = "rows of similar length, with a mask" if with_sinks else "rows of similar length"
        return f"PyTorch's memory-efficient attention, for {of_what}"
    return "PyTorch's attention for CPUs, for one sequence after the other"


@torch.enable_grad()  # frozen models are loaded without
def check_shared_keys(device: torch.device, dtype: torch.dtype, *, head_dim: int, with_sinks: bool = False) -> None:
    """Raise CannotPack unless keys that sequences share give the attention, and the gradients, of copied sequences."""
    # Longer than the blocks of a kernel. The third shares a part of what the second has by itself.
    lengths, shared = (150, 190, 200, 3), (0, 130, 170, 0)
    prefixes = prefixes_of(lengths, shared)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, len(prefixes.computed), head_dim)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    prefixes = prefixes.to(device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    keys = SharedKeys(places=prefixes.places, bounds=bounds, lengths=lengths)
    ways = {
        "shared": (tensors, PackRows(rows=rows_of(prefixes.lengths), shared=keys), prefixes.bounds),
        "copied": ([each[:, :, prefixes.places] for each in tensors], PackRows(rows=rows_of(lengths)), bounds),
    }
    found = {}
    for way, (inputs, rows, of_queries) in ways.items():
        attended = _attended(inputs, rows, of_queries, with_sinks=with_sinks)
        own = attended if way == "shared" else attended[:, prefixes.computed]
        found[way] = [own, *torch.autograd.grad(own.square().sum(), tensors)]
    error = max(
        float((mine - theirs).detach().norm() / theirs.detach().norm())
        for mine, theirs in zip(found["shared"], found["copied"], strict=True)
    )
    if not error <= MAX_SHARED_ERROR[dtype]:
        raise CannotPack(f"attention with keys that sequences share is wrong by a fraction of {error:.2g}")


def _attended(inputs: Sequence[Tensor], rows: PackRows, bounds: Tensor, *, with_sinks: bool) -> Tensor:
    """The attention of a check's `inputs`: queries, keys and values of two heads."""
    query = inputs[0]
    attended: Tensor = packed_attention(
        nn.Module(),
        *inputs,
        None,
        rows=rows,
        cu_seq_lens_q=bounds,
        max_length_q=max(row.longest for row in rows.rows),
        scaling=query.shape[-1] ** -0.5,
        s_aux=query.new_ones(2) if with_sinks else None,
    )[0]
    return attended
