"""A model's shadow model, which is loaded beside it, leaves nothing behind when it is replaced."""

import gc
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from slipstream.actors.engine import staged_transfer
from slipstream.actors.engine.reload import Loaded, forget_reload, reload, reloadable_shadow
from slipstream.actors.engine.shadow_model import free, shadow_of, swap
from slipstream.actors.engine.staged_transfer import StagedInitInfo, StagedTransferEngine
from slipstream.actors.weights.receive import Receiver, ReceiverInfo
from slipstream.actors.weights.staged_weights import ModelFolder
from slipstream.common.process.wire import encode
from tests.actors.engine.test_exchange import Layer
from tests.learner.publisher.offers import empty_offer
from tests.tools.run.tiny_model import save_tiny_model


def reloaded_shadow(model: nn.Module) -> nn.Module:
    """As after a reload: what vLLM keeps of each layer has a loader that is bound to the layer."""
    shadow = reloadable_shadow(model)
    for layer in shadow.modules():
        (parameters, _) = get_layerwise_info(layer).restore_metadata
        for tensor in parameters.values():
            tensor.weight_loader = layer.forward
    return shadow


def test_a_shadow_that_was_swapped_in_and_out_is_freed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model.modules():
        weights = {name: tensor.to("meta") for name, tensor in layer._parameters.items() if tensor is not None}
        get_layerwise_info(layer).restore_metadata = (weights, {})
    num_known, freed = len(LAYERWISE_INFO), []
    for version in range(5):
        shadow = reloaded_shadow(model)
        with torch.no_grad():
            shadow[0].weight.fill_(version)
        forget_reload(shadow)
        swap(model, shadow)
        assert model[0].weight.unique().tolist() == [version]
        freed.append(weakref.ref(shadow[1]))
        del shadow
        gc.collect()
    assert [reference() for reference in freed] == [None] * 5
    assert len(LAYERWISE_INFO) == num_known


def test_a_shadow_is_freed_without_a_garbage_collection() -> None:
    """Its loaders refer to it: a real engine grew by a model with each version, from 3.2 to 9.8 GB."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.weight_loader = model.forward
    shadow = shadow_of(model)
    for parameter in shadow.parameters():
        parameter.weight_loader = shadow.forward  # type: ignore[attr-defined]
    swap(model, shadow)
    held = [weakref.ref(parameter) for parameter in shadow.parameters()]
    gc.disable()
    try:
        free(shadow)
        del shadow
        assert [reference() for reference in held] == [None] * 2
    finally:
        gc.enable()
    assert model(torch.ones(2)).shape == (2,)


def transfer_engine(folder: Path) -> StagedTransferEngine:
    text = SimpleNamespace(tie_word_embeddings=True)
    model_config = SimpleNamespace(model=str(save_tiny_model(folder)), dtype=torch.float32, hf_text_config=text)
    vllm_config = SimpleNamespace(model_config=model_config, parallel_config=SimpleNamespace(rank=0, world_size=1))
    info = ReceiverInfo(redis_url="", run_id="", actor="", transport="pull", timeout_s=1.0)
    model = nn.Module()
    model.compute_logits = None
    engine = StagedTransferEngine(None, vllm_config, torch.device("cpu"), model)
    engine.init_transfer_engine(StagedInitInfo(receiver=asdict(info), shadow_room_bytes=0, absent=[]))
    return engine


def test_a_version_is_freed_when_another_replaces_it_before_its_commit_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order to stage the other, not by a garbage collection."""
    loaded, freed = list[int](), list[int]()

    def load(*_: object) -> Loaded:
        loaded.append(len(loaded) + 1)
        return Loaded(switch=lambda: None, untouched=[], free=partial(freed.append, loaded[-1]))

    monkeypatch.setattr(staged_transfer, "loaded_on_cpu", load)
    monkeypatch.setattr(ModelFolder, "check", lambda *_: None)
    monkeypatch.setattr(Receiver, "receive", lambda *_: torch.empty(0, dtype=torch.uint8))
    engine = transfer_engine(tmp_path)

    def wait() -> None:
        while not engine.ended():
            time.sleep(0.001)
        assert engine.refusal() is None

    for version in (1, 2, 3, 4):
        engine.stage(encode(empty_offer(version)))
        wait()
        engine.prepare("")
        wait()
        if version == 3:
            assert freed == [1, 2]
            engine.update_weights({"policy_version": 3})
            engine.finish_weight_update()
            assert engine.keep_or_revert(False)
    assert (loaded, freed) == ([1, 2, 3, 4], [1, 2, 3])
    engine.shutdown()


def test_tensors_that_share_memory_share_it_in_the_shadow_and_not_with_the_model() -> None:
    model = nn.Sequential(Layer(), nn.Linear(2, 2))
    shadow, before = shadow_of(model), model[0].view.clone()
    with torch.no_grad():
        shadow[0].weight += 10
    assert shadow[0].view.equal(before + 10) and model[0].view.equal(before)
    assert shadow[1].weight.equal(model[1].weight) and shadow[1].weight.data_ptr() != model[1].weight.data_ptr()


class Norm(nn.Module):
    """Its loader is a partial function, as in MiniMax M2, which vLLM's CPU build does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.weight_loader = partial(default_weight_loader)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.weight.weight_loader(self.weight, tensor)
        return {"weight"}


def test_a_loader_that_is_a_partial_function_takes_part_in_a_reload() -> None:
    model = Norm()
    record_metadata_for_reloading(model)
    shadow = reloadable_shadow(model)
    for tensor in (torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])):
        assert reload(shadow, {"weight": tensor}, None) == []
        assert shadow.weight.equal(tensor)
    assert model.weight.equal(torch.ones(2))
    forget_reload(shadow)
