"""Attention over 40 packed sequences, forward and backward, against the formula in float64 for each sequence alone."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from slipstream.learner.model.attention import (
    CannotPack,
    PackRows,
    check_kernel,
    check_shared_keys,
    packed_attention,
    rows_of,
)
from slipstream.tools.lab.gpu_check.findings import Findings

NUM_SEQUENCES = 40
# Root of the mean squared error, as a fraction of that of the numbers: bfloat16 rounds to 1/256, float32 sums to 1e-6.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
HEADS = ((4, 4, 64), (12, 2, 128))  # of queries, of keys, and their size; the second as in Qwen2.5-1.5B
WINDOW = 17
LONG_TOKENS = 32_768
KERNEL_WORDS = ("flash", "fmha", "attention", "cutlass")


def check(findings: Findings, device: str) -> None:
    """Every dtype, with and without grouped queries and windows; then one long sequence on a GPU."""
    where, longest = torch.device(device), 400 if device == "cuda" else 30
    for dtype, limit in LIMITS.items():
        findings.note(f"kernel, {dtype}", check_kernel(where, dtype, head_dim=128))
        if device == "cpu" or dtype == torch.bfloat16:  # no kernel takes shared keys in float32 on a GPU
            _check_shared(findings, where, dtype)
        for heads, kv_heads, head_dim in HEADS:
            for window in (None, WINDOW):
                tensors = _tensors(heads, kv_heads, head_dim, _lengths(longest), where)
                error = _error(tensors, _lengths(longest), dtype=dtype, window=window)
                what = f"{dtype}, {heads} and {kv_heads} heads of {head_dim}, window {window}: error"
                findings.at_most(what, error, limit)
    if device == "cuda":
        _refuse_math(findings, where)
        for dtype in LIMITS:
            _one_long(findings, where, dtype)


def _check_shared(findings: Findings, device: torch.device, dtype: torch.dtype) -> None:
    """As the learner checks at its start, for heads of every size here."""
    for head_dim in sorted({head_dim for _, _, head_dim in HEADS}):
        what = f"{dtype}, keys that sequences share, heads of {head_dim}"
        try:
            check_shared_keys(device, dtype, head_dim=head_dim)
            findings.require(what, True)
        except CannotPack as error:
            findings.require(what, False, str(error))


def _lengths(longest: int) -> list[int]:
    return sorted(np.random.default_rng(0).integers(1, longest, NUM_SEQUENCES).tolist(), reverse=True)


def _tensors(heads: int, kv_heads: int, head_dim: int, lengths: list[int], device: torch.device) -> list[Tensor]:
    """Queries, keys, values, and the gradient of what is attended, whose numbers are bfloat16 for every dtype."""
    torch.manual_seed(0)
    shapes = [
        (heads, sum(lengths), head_dim),
        *[(kv_heads, sum(lengths), head_dim)] * 2,
        (sum(lengths), heads, head_dim),
    ]
    return [torch.randn(1, *shape, device=device).bfloat16().double() for shape in shapes]


def _error(tensors: list[Tensor], lengths: list[int], *, dtype: torch.dtype, window: int | None) -> float:
    """The largest error of the attended values and of the gradients."""
    found = _packed([tensor.to(dtype) for tensor in tensors], lengths, window)
    exact = _exact(tensors, lengths, window)
    return max(relative_error(mine, theirs) for mine, theirs in zip(found, exact, strict=True))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root of the mean squared error, as a fraction of that of the numbers."""
    wanted = exact.detach().double()
    return float(((found.detach().double() - wanted).square().mean() / wanted.square().mean()).sqrt())


def _packed(tensors: list[Tensor], lengths: list[int], window: int | None) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    attended, _ = packed_attention(
        nn.Module(),
        *inputs,
        None,
        rows=PackRows(rows=rows_of(lengths)),
        cu_seq_lens_q=torch.tensor([0, *lengths], device=tensors[0].device).cumsum(0).int(),
        max_length_q=max(lengths),
        scaling=tensors[0].shape[-1] ** -0.5,
        sliding_window=window,
    )
    return [attended, *torch.autograd.grad(attended, inputs, tensors[3])]


def _exact(tensors: list[Tensor], lengths: list[int], window: int | None) -> list[Tensor]:
    """The same by the formula, in float64, for each sequence alone."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    groups = inputs[0].shape[1] // inputs[1].shape[1]
    parts = []
    for query, key, value in zip(
        *(torch.split_with_sizes(tensor[0], lengths, dim=1) for tensor in inputs), strict=True
    ):
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        position = torch.arange(query.shape[1], device=query.device)
        behind = position[:, None] - position[None, :]
        sees = (behind >= 0) & (behind < (window or query.shape[1]))
        scores = (query @ key.transpose(1, 2)) * query.shape[-1] ** -0.5
        parts.append((scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    attended = torch.cat(parts)[None]
    return [attended, *torch.autograd.grad(attended, inputs, tensors[3])]


def _refuse_math(findings: Findings, device: torch.device) -> None:
    """Only the kernel that makes a [tokens, tokens] matrix has float64: the learner must refuse it."""
    try:
        findings.require("math attention is refused", False, check_kernel(device, torch.float64, head_dim=64))
    except CannotPack:
        findings.require("math attention is refused", True)


def _one_long(findings: Findings, device: torch.device, dtype: torch.dtype) -> None:
    """No [tokens, tokens] matrix: it would take gigabytes for each head. Names the kernels that ran."""
    heads, kv_heads, head_dim = HEADS[1]
    tensors = [tensor.to(dtype) for tensor in _tensors(heads, kv_heads, head_dim, [LONG_TOKENS], device)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _packed(tensors, [LONG_TOKENS], None)
        torch.cuda.synchronize()
    matrices = heads * LONG_TOKENS**2 * dtype.itemsize
    findings.at_most(
        f"{dtype}, {LONG_TOKENS} tokens: memory, of that of one [tokens, tokens] matrix a head",
        (torch.cuda.max_memory_allocated() - before) / matrices,
        0.125,
    )
    kernels = {event.key for event in profiled.key_averages() if event.self_device_time_total > 0}
    named = sorted(name for name in kernels if any(word in name.lower() for word in KERNEL_WORDS))
    findings.note(f"{dtype}: kernels of attention that ran", "; ".join(named)[:600] or "the profiler saw none")
