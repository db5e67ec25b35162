"""A kept shadow model: when it is made, what happens to it when a load fails, and when an actor works without it."""

import gc
import logging
import weakref
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.actors.engine import kept_shadow
from slipstream.actors.engine.kept_shadow import KeptShadow
from slipstream.actors.engine.shadow_memory import GIB

ROOM = 4 * GIB
OLD, NEW, NEWER = 1.0, 2.0, 3.0


class Model(nn.Module):
    """Loads its weights as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        self.layer.weight = nn.Parameter(torch.full((2, 3), OLD), requires_grad=False)
        self.kernel: object = None
        self.packs = False
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter = dict(self.named_parameters())[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        if self.packs:
            self.kernel = object()
        return loaded


@pytest.fixture(autouse=True)
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_shadow, "memory_of", lambda device: (8 * GIB, 80 * GIB))


def kept(model: Model, *, room_bytes: int = ROOM) -> KeptShadow:
    return KeptShadow(model, SimpleNamespace(dtype=torch.float32), device=torch.device("cpu"), room_bytes=room_bytes)


def weights(value: float) -> dict[str, Tensor]:
    return {"layer.weight": torch.full((2, 3), value)}


def values(model: nn.Module) -> list[float]:
    return model.get_parameter("layer.weight").unique().tolist()


def test_one_shadow_takes_every_version_and_the_model_changes_at_the_switch_only() -> None:
    model = Model()
    shadow, address = kept(model), model.layer.weight.data_ptr()
    first = shadow.load(weights(NEW), has_committed=False)
    assert first is not None and first.untouched == [] and values(model) == [OLD]
    kept_module = shadow._shadow
    first.switch()
    assert values(model) == [NEW] and kept_module is not None and values(kept_module) == [OLD]
    second = shadow.load(weights(NEWER), has_committed=True)
    assert second is not None and values(model) == [NEW] and shadow._shadow is kept_module
    second.switch()
    assert values(model) == [NEWER] and values(kept_module) == [NEW]
    second.switch()
    assert values(model) == [NEW] and model.layer.weight.data_ptr() == address


def test_a_shadow_whose_load_failed_is_freed_and_the_next_load_has_a_new_one() -> None:
    model = Model()
    shadow = kept(model)
    assert shadow.load(weights(NEW), has_committed=False) is not None
    lost = weakref.ref(shadow._shadow)
    with pytest.raises(KeyError):
        shadow.load(weights(NEW) | {"layer.other": torch.zeros(1)}, has_committed=False)
    assert values(model) == [OLD]
    loaded = shadow.load(weights(NEWER), has_committed=False)
    assert loaded is not None and lost() is None
    loaded.switch()
    assert values(model) == [NEWER]


def test_a_reload_that_replaces_an_attribute_ends_the_shadow_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.packs = True
    shadow = kept(model)
    for _ in range(2):
        assert shadow.load(weights(NEW), has_committed=False) is None
    assert values(model) == [OLD] and model.kernel is None
    assert [record.levelno for record in caplog.records] == 2 * [logging.WARNING]
    reason, unused = (record.getMessage() for record in caplog.records)
    assert "vLLM keeps weights of this model in kernel, outside of its tensors" in reason
    assert "4.0 GiB that the engine left to a shadow model stay unused" in unused


def test_an_implementation_with_a_tensor_of_its_own_allows_no_shadow(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.layer.impl = SimpleNamespace(sinks=torch.ones(2), process_weights_after_loading=print)
    assert kept(model).load(weights(NEW), has_committed=True) is None
    assert "vLLM derives layer.impl.sinks from the weights" in caplog.text


def test_without_room_of_its_own_a_shadow_waits_for_the_first_commit_and_then_takes_what_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    shadow = kept(model, room_bytes=0)
    assert shadow.load(weights(NEW), has_committed=False) is None
    monkeypatch.setattr(kept_shadow, "memory_of", lambda device: (11 * GIB, 80 * GIB))
    assert shadow.load(weights(NEW), has_committed=True) is not None
    assert kept(model, room_bytes=0).load(weights(NEW), has_committed=True) is not None
    monkeypatch.setattr(kept_shadow, "memory_of", lambda device: (9 * GIB, 80 * GIB))
    assert kept(model, room_bytes=0).load(weights(NEW), has_committed=True) is None
    assert "a shadow model needs 10.0 GiB, and 9.0 GiB of 80.0 GiB are free" in caplog.text


def test_a_shadow_without_room_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def exhausted(*_: object) -> list[str]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = Model()
    shadow = kept(model)
    monkeypatch.setattr(kept_shadow, "reload", exhausted)
    assert shadow.load(weights(NEW), has_committed=False) is None
    monkeypatch.undo()
    assert shadow.load(weights(NEW), has_committed=False) is None
    assert caplog.text.count("CUDA out of memory") == 1
    gc.collect()
    assert values(model) == [OLD]
