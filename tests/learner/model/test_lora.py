"""LoRA: what is trained, what it computes, and what leaves the learner."""

import dataclasses
import json
import weakref
from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import pack
from slipstream.learner.model.export import save_adapters, save_hf
from slipstream.learner.model.gradient import apply_gradient, backward
from slipstream.learner.model.lora import Adapter, adapters_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors, named_shards
from slipstream.learner.ranks.ranks import Ranks
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.learner.checkpoint.test_checkpoint import Learner, begun
from tests.tools.run.tiny_model import FLOAT32, any_id, random_sequence, save_tiny_model

__all__ = ["any_id"]  # a fixture
pytestmark = pytest.mark.usefixtures("any_id")

LORA = LoraConfig(rank=4, alpha=12)
OPTIM = OptimConfig(lr=1e-2)
PACKED = pack([random_sequence(length, seed=length) for length in (9, 13, 40)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    merging_tokenizer(CHATML).save_pretrained(folder)
    return folder


def loaded(folder: Path, ranks: Ranks, lora: LoraConfig = LORA, *, dtype: str = "float32") -> PackedModel:
    return load_model(folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype=dtype, lora=lora))


def train(learner: Learner, *, steps: int) -> None:
    for _ in range(steps):
        backward(-learner.model(PACKED).logprobs.sum(), ranks=learner.ranks, divisor=56)
        apply_gradient(learner.optimizer, learner.schedule, max_grad_norm=1.0)


def shards(model: PackedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in named_shards(model)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_adapters_change_no_log_probability_and_no_weight(folder: Path, ranks: Ranks, dtype: str) -> None:
    plain, adapted = loaded(folder, ranks, LoraConfig(), dtype=dtype), loaded(folder, ranks, dtype=dtype)
    if dtype == "float32":
        assert torch.equal(adapted(PACKED).logprobs, plain(PACKED).logprobs)
    torch.testing.assert_close(dict(full_tensors(adapted)), dict(full_tensors(plain)), rtol=0, atol=0)


def test_only_adapters_train_and_peft_loads_them_on_their_own(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    learner = begun(loaded(folder, ranks), ranks, OPTIM)
    before = shards(learner.model)
    train(learner, steps=5)
    after = shards(learner.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * 2 * 7  # A and B of seven linear layers in each of two decoder layers
    assert sum(len(group["params"]) for group in learner.optimizer.param_groups) == len(changed)

    save_adapters(learner.model, tmp_path, ranks=ranks)
    base = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().named_parameters())
    expected = dict(full_tensors(learner.model))
    assert found.keys() == expected.keys()
    torch.testing.assert_close({name: found[name].detach() for name in expected}, expected)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


def test_the_gradient_is_the_whole_weights_through_the_product(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    """With G the gradient of the merged weight: that of B is s G A^T, and that of A is s B^T G."""
    model = loaded(folder, ranks)
    train(begun(model, ranks, OPTIM), steps=3)
    save_hf(model, tmp_path / "merged", ranks=ranks)
    whole = loaded(tmp_path / "merged", ranks, LoraConfig())
    for each in (model, whole):
        each(PACKED).logprobs.sum().backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in named_shards(whole)}
    for name, adapter in adapters_of(model.causal_lm).items():
        down, up = adapter.down.full_tensor(), adapter.up.full_tensor()
        assert adapter.scaling == 3.0
        torch.testing.assert_close(adapter.up.grad.full_tensor(), 3 * gradients[name] @ down.T, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(adapter.down.grad.full_tensor(), 3 * up.T @ gradients[name], rtol=1e-4, atol=1e-3)


def test_a_checkpoint_holds_what_trains_and_resumes_bit_for_bit(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    steady, resumed = (begun(loaded(folder, ranks), ranks, OPTIM) for _ in range(2))
    train(steady, steps=2)
    path = steady.save(tmp_path, 2)
    with safe_open(next(path.glob("*.safetensors")), "pt") as file:
        held = {name for name in file.keys() if name != "rng"}  # noqa: SIM118 - not a dict
    assert all(".lora_" in name for name in held)
    assert len(held) == 28 * 4  # the weight, and AdamW's step and two moments
    train(steady, steps=2)

    resumed.load(path)
    train(resumed, steps=2)
    torch.testing.assert_close(shards(resumed.model), shards(steady.model), rtol=0, atol=0)


def test_adapters_of_the_same_seed_are_the_same_and_draw_nothing_from_it(folder: Path, ranks: Ranks) -> None:
    drawn, following = [], []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(shards(loaded(folder, ranks))["model.layers.1.mlp.down_proj.lora_A.default.weight"])
        following.append(torch.rand(3))
    torch.manual_seed(5)
    assert torch.equal(following[0], torch.rand(3))
    assert torch.equal(drawn[1], drawn[0]) and not torch.equal(drawn[2], drawn[0])


def test_weights_are_merged_one_at_a_time(folder: Path, ranks: Ranks) -> None:
    model, merged = loaded(folder, ranks), []
    for name, tensor in full_tensors(model):
        assert not any(ref() is not None for ref in merged), f"another was alive when {name} was made"
        if name in adapters_of(model.causal_lm):
            merged.append(weakref.ref(tensor))
        del tensor
    assert len(merged) == 14


def test_a_layer_that_its_adapter_changes_otherwise_than_merged_weights_is_refused(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "merged", lambda adapter, weight: weight + weight.std())
    with pytest.raises(ConfigError, match=r"model.layers.1.self_attn.q_proj differs from its merged weights"):
        loaded(folder, ranks)
