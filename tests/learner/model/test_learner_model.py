import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from slipstream.common.records.kept_sets import kept_sets
from slipstream.learner.batch.pack import pack
from slipstream.learner.model import packed_model
from slipstream.learner.model.critic import SharedTrunk, ValueModel
from slipstream.learner.model.flops import _known_peak
from slipstream.learner.model.kernel import sequence_bounds
from slipstream.learner.model.packed_model import PackedModel, expect_backward, load_kind, load_model
from slipstream.learner.model.reward_model import RewardModel
from slipstream.learner.model.states import decoder_layers
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from tests.learner.devices import gradients, kept_bytes
from tests.learner.model.test_model_families import alone
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model


@pytest.fixture(scope="module")
def model(tiny: Path, ranks: Ranks) -> PackedModel:
    return load_model(tiny, ranks=ranks, settings=FLOAT32)


def test_kept_sets_reach_the_softmax_of_their_token(model: PackedModel, tiny: Path, device: torch.device) -> None:
    causal_lm = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    sequences, expected = [], []
    for length in (9, 12):  # the longer is packed first
        bare = random_sequence(length, seed=length, prompt=2)
        sets = [sorted({token, 7 * place, 3}) for place, token in enumerate(bare.tokens.tolist())][2:]
        sequences.append(dataclasses.replace(bare, kept=kept_sets(sets)))
        with torch.no_grad():
            logits = causal_lm(input_ids=torch.from_numpy(bare.tokens).long()[None]).logits[0].double()
        for place, kept in enumerate(sets, start=2):
            of_kept = logits[place - 1, kept].log_softmax(-1)
            expected.append((length, float(of_kept[kept.index(int(bare.tokens[place]))])))
    found = model(pack(sequences).to(device)).logprobs
    longest_first = [logprob for _, logprob in sorted(expected, key=lambda pair: -pair[0])]
    assert found.tolist() == pytest.approx(longest_first, abs=1e-5 if device.type == "cpu" else 1e-4)


def test_activation_checkpointing_keeps_what_enters_a_layer_and_changes_no_gradient(
    model: PackedModel, tiny: Path, ranks: Ranks
) -> None:
    frugal = load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, activation_checkpointing=True))
    sequences = [random_sequence(length, seed=length) for length in (9, 13)]
    model(pack(sequences)).logprobs.sum().backward()
    frugal(pack(sequences)).logprobs.sum().backward()
    torch.testing.assert_close(gradients(frugal), gradients(model), rtol=1e-6, atol=1e-6)
    packed = pack([random_sequence(200, seed=seed) for seed in range(4)])
    assert kept_bytes(frugal, packed) < 0.3 * kept_bytes(model, packed)


def test_offloaded_weights_get_the_same_gradients(model: PackedModel, tiny: Path, ranks: Ranks) -> None:
    offloaded = load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, cpu_offload=True))
    sequences = [random_sequence(length, seed=length) for length in (9, 13)]
    model(pack(sequences)).logprobs.sum().backward()
    for last in (False, True):  # it hands over every gradient
        expect_backward(offloaded, last=last)
        offloaded(pack([sequences[last]])).logprobs.sum().backward()
        assert all(parameter.grad is not None for parameter in offloaded.parameters())
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"cpu"}
    torch.testing.assert_close(gradients(offloaded), gradients(model), rtol=1e-5, atol=1e-5)


def test_one_rank_syncs_the_sum_of_its_gradients_with_the_last_micro_batch(model: PackedModel) -> None:
    first, second = (random_sequence(length, seed=length) for length in (9, 13))
    model(pack([first, second])).logprobs.sum().backward()
    expected = gradients(model)
    expect_backward(model, last=False)
    model(pack([first])).logprobs.sum().backward()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # as FSDP lends them out
    expect_backward(model, last=True)
    model(pack([second])).logprobs.sum().backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-5)


def test_large_layers_are_groups_of_their_own_with_the_same_gradients(
    model: PackedModel, tiny: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So FSDP has a copy of one layer's weights and gradients at a time, not of all."""
    monkeypatch.setattr(packed_model, "LARGE_LAYER_BYTES", 0)
    grouped = load_model(tiny, ranks=ranks, settings=FLOAT32)
    num_groups = sum(isinstance(module, FSDPModule) for module in grouped.modules())
    assert num_groups == 1 + len(decoder_layers(grouped.causal_lm))
    for each in (model, grouped):
        for last in (False, True):
            expect_backward(each, last=last)
            each(pack([random_sequence(13, seed=last)])).logprobs.sum().backward()
    torch.testing.assert_close(gradients(grouped), gradients(model), rtol=0, atol=0)


def test_bfloat16_keeps_weights_logprobs_and_sums_of_gradients_in_float32(tiny: Path, ranks: Ranks) -> None:
    model = load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype="bfloat16"))
    sequence = random_sequence(20, seed=4)
    with torch.no_grad():
        logprobs = model(pack([sequence])).logprobs
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(dict(full_tensors(model)), load_file(tiny / "model.safetensors"), rtol=0, atol=0)
    expected = alone(tiny, sequence)[0][torch.from_numpy(sequence.loss_mask)[1:]]
    assert (logprobs - expected).abs().mean() < 0.2

    sequences = [random_sequence(20, seed=seed) for seed in range(4)]
    expected = None
    for sequence in sequences:
        model(pack([sequence])).logprobs.sum().backward()
        found = gradients(model)
        expected = found if expected is None else [old + new for old, new in zip(expected, found, strict=True)]
    for sequence in sequences:
        expect_backward(model, last=sequence is sequences[-1])
        model(pack([sequence])).logprobs.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(gradients(model), expected, rtol=1e-6, atol=1e-6)


def test_flash_attentions_varlen_kernels_get_the_sequence_bounds() -> None:
    """By the names that transformers hands on to them; the kernels themselves need a GPU."""
    bounds = sequence_bounds(pack([random_sequence(length, seed=length) for length in (3, 5)]))
    known = inspect.signature(_flash_attention_forward).parameters
    names = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert names <= known.keys()
    assert names == bounds.keys() - {"rows"}
    assert known["kwargs"].kind is inspect.Parameter.VAR_KEYWORD  # takes `rows`, and leaves it
    assert bounds["cu_seq_lens_q"].tolist() == bounds["cu_seq_lens_k"].tolist() == [0, 5, 8]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["max_length_q"] == bounds["max_length_k"] == 5


@pytest.mark.parametrize(
    ("kind", "head"), [(ValueModel, "value_head"), (SharedTrunk, "value_head"), (RewardModel, "score")]
)
def test_heads_are_float32_on_a_bfloat16_trunk(tiny: Path, ranks: Ranks, kind: type[PackedModel], head: str) -> None:
    model = load_kind(kind, tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype="bfloat16"))
    shard = getattr(model, head).weight.to_local()
    shard.data.copy_(1 + torch.arange(shard.numel()).view_as(shard) * 2.0**-12)  # bfloat16 rounds most of them to 1
    weight = shard.detach().clone().flatten()
    seen: list[tuple[Tensor, Tensor]] = []
    getattr(model, head).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    found = model(pack([random_sequence(20, seed=4)]))
    ((hidden, numbers),) = seen
    assert hidden.dtype == torch.bfloat16 and numbers.dtype == torch.float32
    torch.testing.assert_close(numbers, hidden.float() @ weight, rtol=1e-5, atol=1e-5)
    assert (numbers - hidden.float() @ weight.bfloat16().float()).abs().max() > 1e-2  # which would have been another
    (found.values if kind is SharedTrunk else found).sum().backward()
    gradient = getattr(model, head).weight.grad.full_tensor().flatten()
    torch.testing.assert_close(gradient, hidden.float().sum(dim=0), rtol=1e-5, atol=1e-5)


PEAKS = {"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA GH200 480GB": 989.0, "NVIDIA L40": 181.0}


@pytest.mark.parametrize(("name", "peak"), [*PEAKS.items(), ("NVIDIA RTX A1000 Laptop GPU", None)])
def test_a_gpu_has_the_peak_of_its_whole_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert _known_peak(torch.device("cuda")) == peak


def test_a_folder_without_a_model_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"`model.path` .* has no config.json"):
        load_model(tmp_path, ranks=ranks, settings=FLOAT32)
    config = save_tiny_model(tmp_path) / "config.json"
    for name in ('"NoSuchModel"', "", '"Qwen3ForCausalLM", "NoSuchModel"'):  # the export could not be read
        config.write_text(re.sub(r'("architectures": )\[[^]]*\]', rf"\1[{name}]", config.read_text()))
        with pytest.raises(ValueError, match=r"config.json must name one class of transformers in `architectures`"):
            load_model(tmp_path, ranks=ranks, settings=FLOAT32)
