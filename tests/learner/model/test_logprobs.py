from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.logprobs import TokenLogprobs, chunked_logprobs, predictions
from tests.learner.devices import relative_error

MAX_NATS = {torch.bfloat16: 1e-3, torch.float32: 1e-4}  # of one token; logits in bfloat16 would be 0.012 off


def test_the_state_before_a_loss_token_predicts_it() -> None:
    sequence = TokenSequence.bare([7, 8, 9, 5, 6], [False, True, False, False, True])
    found = predictions(torch.arange(10.0).reshape(5, 2), pack([sequence]))
    assert found.states.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert found.targets.tolist() == [8, 6]


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor))])
        return made


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_of_all_tokens_never_exist_forward_or_backward(entropy_gradient: bool) -> None:
    hidden, weight = torch.randn(50, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with LargestTensor() as largest:
        named = {"temperature": 0.7, "chunk_tokens": 8, "entropy_gradient": entropy_gradient}
        found = chunked_logprobs(hidden, weight, None, torch.arange(50), **named)
        (found.logprobs + found.entropies).sum().backward()
    assert largest.numel == 8 * 300


def test_no_loss_tokens_still_reach_the_head() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    chunked_logprobs(hidden, weight, None, none, temperature=1.0, chunk_tokens=8).logprobs.sum().backward()
    assert not weight.grad.any()


def test_a_greedy_policy_is_refused() -> None:
    target = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        chunked_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), None, target, temperature=0, chunk_tokens=1)


def test_the_entropy_has_no_gradient_unless_asked_for() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    found = chunked_logprobs(hidden, weight, None, torch.arange(5), temperature=0.7, chunk_tokens=2)
    assert found.logprobs.requires_grad and not found.entropies.requires_grad


def test_each_target_has_the_temperature_that_it_was_sampled_at(device: torch.device) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(shape, device=device) for shape in ((5, 4), (7, 4), (7,)))
    targets, temperatures = torch.tensor([0, 3, 6, 2, 2], device=device), [0.5, 1.0, 0.5, 2.0, 1.3]
    kept = torch.tensor([[0, 1], [3, -1], [-1, -1], [2, 5], [-1, -1]], dtype=torch.int32, device=device)
    in_twos = partial(chunked_logprobs, chunk_tokens=2)
    for sets in ({}, {"kept": kept, "has_kept": (kept >= 0).any(1)}):
        found = in_twos(hidden, weight, bias, targets, temperature=hidden.new_tensor(temperatures), **sets)
        for row, temperature in enumerate(temperatures):
            one = slice(row, row + 1)
            of_row = {name: value[one] for name, value in sets.items()}
            alone = in_twos(hidden[one], weight, bias, targets[one], temperature=temperature, **of_row)
            torch.testing.assert_close(found.logprobs[one], alone.logprobs)
            torch.testing.assert_close(found.entropies[one], alone.entropies)


def random_kept(*, tokens: int, words: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets, and sets of 1 to `width` words that hold them, filled up with -1."""
    generator = torch.Generator().manual_seed(3)
    kept = torch.stack([torch.randperm(words, generator=generator)[:width] for _ in range(tokens)])
    sizes = torch.randint(1, width + 1, (tokens,), generator=generator)
    return kept[:, 0], kept.masked_fill(torch.arange(width) >= sizes[:, None], -1).int()


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("has_sets", [False, True])
@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_all_is_as_in_a_softmax_of_each_token_over_what_it_was_sampled_from(
    chunk_tokens: int, has_sets: bool, entropy_gradient: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    bias, upstream = torch.randn(9, dtype=torch.float64), torch.randn(2, 11, dtype=torch.float64)
    targets, kept = random_kept(tokens=11, words=9, width=4)

    def gradients(logprobs: Tensor, entropies: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        total = logprobs @ upstream[0] + (entropies @ upstream[1] if entropy_gradient else 0)
        return torch.autograd.grad(total, leaves)

    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    named = {"kept": kept if has_sets else None, "chunk_tokens": chunk_tokens, "entropy_gradient": entropy_gradient}
    found = chunked_logprobs(*leaves, targets, temperature=0.7, **named)

    others = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logprobs, entropies = [], []
    for row in range(11):  # one token after another, from the definition: p = exp(z) / sum over the set
        words = [word for word in kept[row].tolist() if word >= 0] if has_sets else list(range(9))
        logits = [others[0][row] @ others[1][word] + others[2][word] for word in words]
        exponentials = (torch.stack(logits) / 0.7).exp()
        probabilities = exponentials / exponentials.sum()
        logprobs.append(probabilities[words.index(int(targets[row]))].log())
        entropies.append(-(probabilities * probabilities.log()).sum())
    expected = TokenLogprobs(logprobs=torch.stack(logprobs), entropies=torch.stack(entropies))
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropies, expected.entropies, rtol=1e-12, atol=1e-12)
    of_leaves = gradients(found.logprobs, found.entropies, leaves)
    of_others = gradients(expected.logprobs, expected.entropies, others)
    torch.testing.assert_close(of_leaves, of_others, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", MAX_NATS)
def test_of_bfloat16_numbers_all_is_as_in_float64(dtype: torch.dtype, temperature: float, device: torch.device) -> None:
    """A GPU multiplies them with tensor cores: there in the size of a model of 1.5 billion weights."""
    num_tokens, width, num_words, chunk = (64, 64, 1000, 16) if device.type == "cpu" else (4096, 1536, 151_936, 1024)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, device=device).bfloat16()
    weight = (torch.randn(num_words, width, device=device) * width**-0.5).bfloat16()
    bias, targets = torch.randn(num_words, device=device).bfloat16(), torch.arange(num_tokens, device=device) % 1000
    results = []
    for each in (dtype, torch.float64):
        states, head = (tensor.to(each, copy=True).requires_grad_() for tensor in (hidden, weight))
        found = chunked_logprobs(
            states, head, bias.to(each), targets, temperature=temperature, chunk_tokens=chunk, entropy_gradient=True
        )
        assert found.logprobs.dtype == torch.promote_types(each, torch.float32)
        gradients = torch.autograd.grad((found.logprobs + found.entropies).sum(), (states, head))
        results.append((found.logprobs.detach(), found.entropies.detach(), *gradients))
    logprobs, entropies, of_states, of_head = zip(*results, strict=True)
    for values in (logprobs, entropies):
        assert (values[0].double() - values[1]).abs().max() <= MAX_NATS[dtype]
    for gradients in (of_states, of_head):  # in bfloat16 they are rounded to 8 bits, and so is that of the logits
        assert relative_error(*gradients) <= 5e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7, "of each token"])
@pytest.mark.parametrize("sets", ["none", "all", "some"])
def test_the_derivative_is_that_of_differences(sets: str, temperature: float | str) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((5, 3), (7, 3), (7,))
    )
    targets, kept = random_kept(tokens=5, words=7, width=3)
    has_kept = torch.tensor([True, False, True, True, False])
    named: dict[str, Any] = {} if sets == "none" else {"kept": kept}
    if sets == "some":
        named = {"kept": kept.masked_fill(~has_kept[:, None], -1), "has_kept": has_kept}
    each = torch.tensor([0.5, 1.0, 2.0, 0.8, 1.3], dtype=torch.float64)
    named |= {"temperature": each if isinstance(temperature, str) else temperature, "entropy_gradient": True}

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = chunked_logprobs(hidden, weight, bias, targets, chunk_tokens=2, **named)
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("with_kept", [False, True])
def test_absent_ids_have_no_probability_and_no_gradient(with_kept: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets, known = torch.tensor([0, 1, 3, 7, 3]), torch.tensor([0, 1, 2, 3, 5, 6, 7])
    named: dict[str, Any] = {"absent": torch.tensor([4, 8]), "temperature": 0.8, "entropy_gradient": True}
    if with_kept:
        named["kept"] = torch.tensor([[0, 1], [1, -1], [3, 5], [7, 2], [3, 0]])
        named["has_kept"] = torch.tensor([False, True, False, True, False])
    found = chunked_logprobs(hidden, weight, None, targets, chunk_tokens=2, **named)
    (found.logprobs.sum() + found.entropies.sum()).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()
    assert not weight.grad[[4, 8]].any() and weight.grad[known].abs().min() > 0

    table = (hidden @ weight[known].T / 0.8).log_softmax(dim=1)
    expected = table.gather(1, torch.searchsorted(known, targets)[:, None]).squeeze(1)
    whole = torch.tensor([0, 2, 4]) if with_kept else torch.arange(5)
    torch.testing.assert_close(found.logprobs[whole], expected[whole])
    torch.testing.assert_close(found.entropies[whole], -(table.exp() * table).sum(1)[whole])
