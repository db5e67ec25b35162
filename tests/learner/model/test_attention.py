"""Attention over packed sequences, forward and backward, against the formula in float64 for each sequence alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.learner.model import attention
from slipstream.learner.model.attention import CannotPack, PackRows, check_kernel, packed_attention, rows_of
from tests.learner.devices import relative_error

MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # bfloat16 rounds to 1/256
HEADS = [(4, 4, 64), (12, 2, 128)]  # of queries, of keys, and their size; the second as in Qwen2.5-1.5B


def random_tensors(heads: tuple[int, int, int], num_tokens: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values, and the gradient of what is attended, whose numbers are bfloat16 in every dtype."""
    queries, keys, head_dim = heads
    torch.manual_seed(0)
    shapes = [(queries, num_tokens, head_dim), *[(keys, num_tokens, head_dim)] * 2, (num_tokens, queries, head_dim)]
    return [torch.randn(1, *shape, device=device).bfloat16() for shape in shapes]


def packed(tensors: list[Tensor], lengths: list[int], window: int | None) -> list[Tensor]:
    """What is attended, and the gradients of queries, keys and values."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    starts = torch.tensor([0, *lengths], device=inputs[0].device).cumsum(0).int()
    bounds = {"rows": PackRows(rows=rows_of(lengths)), "cu_seq_lens_q": starts, "max_length_q": max(lengths)}
    scaling = inputs[0].shape[-1] ** -0.5
    attended, _ = packed_attention(nn.Module(), *inputs, None, scaling=scaling, sliding_window=window, **bounds)
    return [attended, *torch.autograd.grad(attended, inputs, tensors[3])]


def by_formula(tensors: list[Tensor], lengths: list[int], window: int | None) -> list[Tensor]:
    """The same for each sequence alone."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    groups = inputs[0].shape[1] // inputs[1].shape[1]
    parts = []
    of_sequences = zip(*(torch.split_with_sizes(tensor[0], lengths, dim=1) for tensor in inputs), strict=True)
    for query, key, value in of_sequences:
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        position = torch.arange(query.shape[1], device=query.device)
        behind = position[:, None] - position[None, :]
        sees = (behind >= 0) & (behind < (window or query.shape[1]))
        scores = (query @ key.transpose(1, 2)) * query.shape[-1] ** -0.5
        parts.append((scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    attended = torch.cat(parts)[None]
    return [attended, *torch.autograd.grad(attended, inputs, tensors[3])]


def error_of(tensors: list[Tensor], lengths: list[int], *, dtype: torch.dtype, window: int | None = None) -> float:
    found = packed([tensor.to(dtype) for tensor in tensors], lengths, window)
    exact = by_formula([tensor.double() for tensor in tensors], lengths, window)
    return max(relative_error(mine, theirs) for mine, theirs in zip(found, exact, strict=True))


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_attention_and_its_gradients_are_those_of_the_formula(
    dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, device: torch.device
) -> None:
    longest = 30 if device.type == "cpu" else 400
    lengths = sorted(np.random.default_rng(0).integers(1, longest, 40).tolist(), reverse=True)
    tensors = random_tensors(heads, sum(lengths), device)
    assert error_of(tensors, lengths, dtype=dtype, window=window) <= MAX_ERROR[dtype]


def test_a_kernel_that_makes_a_matrix_of_tokens_by_tokens_is_refused(gpu: torch.device) -> None:
    """In float64 a GPU has no other."""
    with pytest.raises(CannotPack):
        check_kernel(gpu, torch.float64, head_dim=64)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_32768_tokens_take_a_fraction_of_the_memory_of_such_a_matrix(dtype: torch.dtype, gpu: torch.device) -> None:
    num_tokens = 32_768
    tensors = [tensor.to(dtype) for tensor in random_tensors(HEADS[1], num_tokens, gpu)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed(tensors, [num_tokens], None)
    of_each_head = num_tokens**2 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before <= 0.125 * HEADS[1][0] * of_each_head


def test_flash_attention_without_grouped_queries_gets_as_many_keys_as_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11's function has no `enable_gqa`; this one stands in for it on a CPU, and takes what it takes."""

    def varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *bounds: object, **named: object) -> Tensor:
        assert len(bounds) == 3 and named.keys() <= {"return_aux", "scale", "window_size"}
        assert query.shape[1] == key.shape[1] == value.shape[1]
        parts = [
            F.scaled_dot_product_attention(
                *(each[start:stop].transpose(0, 1) for each in (query, key, value)), is_causal=True
            )
            for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "FLASH_TAKES_GROUPS", False)
    monkeypatch.setattr(attention, "flash_runs", lambda query, value: True)
    tensors = random_tensors((12, 2, 64), 16, torch.device("cpu"))
    assert error_of(tensors, [9, 5, 2], dtype=torch.float32) < 1e-6
