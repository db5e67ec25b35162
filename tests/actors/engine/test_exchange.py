"""Exchanging the contents of a model's tensors and its shadow's: what it changes, what it leaves, what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.actors.engine.attributes import attributes_of, changed_attribute, derived_tensor
from slipstream.actors.engine.exchange import Unpaired, exchange, pieces_of, storages_of, tensors_of
from slipstream.actors.engine.shadow_model import shadow_of


class Layer(nn.Module):
    """With what models have: a weight, a view of it, buffers of other kinds, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 1, 7).bfloat16(), requires_grad=False)
        self.register_buffer("view", self.weight.data[1:].view(4, 7), persistent=False)
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("number", torch.tensor(3, dtype=torch.int64))
        self.empty = nn.Parameter(torch.empty(0))
        self.packed: object = "as it was"


def model_with_tied_weights() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(11, 7), "layer": Layer(), "head": nn.Linear(7, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def other_values(model: nn.Module) -> nn.Module:
    shadow = shadow_of(model)
    with torch.no_grad():
        for tensor in tensors_of(shadow).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
        shadow["layer"].number.fill_(9)
    return shadow


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("piece_bytes", [1, 5, 1 << 20])
def test_an_exchange_keeps_addresses_and_a_second_one_undoes_it(piece_bytes: int, device: torch.device) -> None:
    """At the old addresses, as CUDA graphs read them there."""
    with device:
        model = model_with_tied_weights()
    shadow = other_values(model)
    mine, its = values_of(model), values_of(shadow)
    places = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_of(model).items()}
    assert not same(mine, its) and len(mine) == 7
    pieces = pieces_of(model, shadow, piece_bytes=piece_bytes)
    exchange(pieces)
    assert same(values_of(model), its) and same(values_of(shadow), mine)
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_of(model).items()} == places
    exchange(pieces)
    assert same(values_of(model), mine) and same(values_of(shadow), its)


def test_memory_that_tensors_share_is_exchanged_once() -> None:
    model = model_with_tied_weights()
    num_bytes = sum(piece.mine.numel() for piece in pieces_of(model, other_values(model)))
    assert num_bytes == 11 * 7 * 4 + 5 * 7 * 2 + 6 * 4 + 8  # the embedding, the weight with its view, and the buffers
    assert num_bytes == sum(storage.nbytes() for storage in storages_of(model).values())
    assert model["layer"].view.data_ptr() == model["layer"].weight[1:].data_ptr()


class Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.sizes.append(result.nbytes)
        else:
            assert func in (torch.ops.aten.copy_.default, torch.ops.aten.slice.Tensor), func
        return result


def test_an_exchange_allocates_one_temporary_of_the_size_of_a_piece() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 3))
    pieces = pieces_of(model, shadow_of(model), piece_bytes=4096)
    with Allocations() as allocations:
        exchange(pieces)
    assert allocations.sizes == [4096]


MODEL = model_with_tied_weights()


def set_weight(tensor: torch.Tensor) -> Callable[[nn.Module], None]:
    def change(shadow: nn.Module) -> None:
        shadow["layer"].weight = nn.Parameter(tensor, requires_grad=False)

    return change


def untie(shadow: nn.Module) -> None:
    shadow["head"].weight = nn.Parameter(shadow["embed"].weight.detach().clone())


def lose(shadow: nn.Module) -> None:
    del shadow["layer"].number


def share(shadow: nn.Module) -> None:
    shadow["layer"].transposed = MODEL["layer"].transposed


def overlap(shadow: nn.Module) -> None:
    data = shadow["layer"].weight.view(torch.uint8).numpy()  # another storage at the same memory, a little further on
    shadow["layer"].transposed = torch.from_numpy(data.reshape(-1)[8:32]).view(torch.float32).view(2, 3).t()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_weight(torch.zeros(5, 7).bfloat16()), r"layer.weight has the shape \(5, 1, 7\) .* and \(5, 7\) in its"),
        (set_weight(torch.zeros(5, 1, 7).half()), "layer.weight has the dtype torch.bfloat16 .* torch.float16 in its"),
        (set_weight(torch.zeros(7, 1, 5).bfloat16().transpose(0, 2)), "layer.weight has the strides"),
        (set_weight(torch.zeros(36).bfloat16()[1:].view(5, 1, 7)), "layer.weight has the offset 0 .* and 1 in its"),
        (set_weight(torch.zeros(40).bfloat16()[:35].view(5, 1, 7)), "layer.weight has the memory in bytes 70"),
        (set_weight(torch.zeros(5, 1, 7, device="meta").bfloat16()), "layer.weight has the device cpu .* and meta"),
        (set_weight(torch.zeros(5, 1, 7).bfloat16()), "layer.view shares memory with another tensor in only one"),
        (untie, "head.weight shares memory with another tensor in only one"),
        (lose, "has no layer.number"),
        (share, "overlap"),
        (overlap, "overlap"),
    ],
)
def test_a_shadow_that_is_not_alike_changes_nothing(change: Callable[[nn.Module], None], reason: str) -> None:
    shadow, before = other_values(MODEL), values_of(MODEL)
    change(shadow)
    with pytest.raises(Unpaired, match=reason):
        pieces_of(MODEL, shadow)
    assert same(values_of(MODEL), before)


def test_what_a_reload_changes_beside_tensors_is_found() -> None:
    model = model_with_tied_weights()
    before = attributes_of(model)
    model["layer"].packed = "as it " + "was"
    model["layer"].weight = nn.Parameter(torch.zeros(2))
    assert changed_attribute(before, model) is None
    for value in ("packed", torch.zeros(2), object(), None):
        model["layer"].packed = value
        assert changed_attribute(before, model) == "layer.packed"
    del model["layer"].packed
    assert changed_attribute(before, model) == "layer.packed"


def test_equal_tensors_and_lists_of_plain_values_are_no_change() -> None:
    model = nn.Linear(2, 2)
    model.scales, model.sizes = torch.ones(3), [4, (5, "x")]
    before = attributes_of(model)
    model.scales, model.sizes = torch.ones(3), [4, (5, "x")]
    assert changed_attribute(before, model) is None
    for changed in (2 * torch.ones(3), torch.ones(4), torch.ones(3).double()):
        model.scales = changed
        assert changed_attribute(before, model) == "scales"
    model.scales, model.sizes = torch.ones(3), [4, (5, "y")]
    assert changed_attribute(before, model) == "sizes"


class Attention:
    """As vLLM's implementations of attention: processed after each load, and no module."""

    def __init__(self, sinks: torch.Tensor) -> None:
        self.sinks = sinks

    def process_weights_after_loading(self) -> None: ...


def test_a_tensor_that_is_derived_from_weights_is_found_and_the_models_own_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].impl = Attention(model[0].bias)
    assert derived_tensor(model) is None
    model[0].impl = Attention(model[0].bias.double())
    assert derived_tensor(model) == "0.impl.sinks"
