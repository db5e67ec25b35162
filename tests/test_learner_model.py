import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

from common.kept_sets import kept_sets
from learner.model import PackedModel, full_tensors, load_model, save_hf
from learner.pack import TokenSequence, pack
from learner.ranks import Ranks
from tests.tiny_model import random_sequence, save_tiny_model

LENGTHS = (30, 29, 24, 11, 11, 11, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path, ranks: Ranks) -> Iterator[PackedModel]:
    yield load_model(folder, ranks=ranks, dtype="float32", activation_checkpointing=False)


def logprobs_of(model: PackedModel, sequences: list[TokenSequence]) -> Tensor:
    return model(pack(sequences), temperature=1.0, chunk_tokens=16).logprobs


def plain_logprobs(folder: Path, sequence: TokenSequence) -> Tensor:
    """By transformers alone: one sequence, eager attention, its own mask."""
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.from_numpy(sequence.tokens).long()
    with torch.no_grad():
        table = (
            causal_lm(input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None]).logits[0].log_softmax(-1)
        )
    predicted = table[:-1].gather(1, tokens[1:, None]).squeeze(1)
    return predicted[torch.from_numpy(sequence.loss_mask)[1:]]


def assert_packed_equals_plain(model: PackedModel, folder: Path) -> None:
    sequences = [random_sequence(length, seed=length, prompt=1) for length in LENGTHS]
    expected = torch.cat([plain_logprobs(folder, sequence) for sequence in sequences])
    torch.testing.assert_close(logprobs_of(model, sequences).detach(), expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_get_the_logprobs_that_transformers_gives_each_alone(model: PackedModel, folder: Path) -> None:
    assert_packed_equals_plain(model, folder)


def test_kept_sets_reach_the_softmax_of_the_token_that_they_belong_to(model: PackedModel, folder: Path) -> None:
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
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
    found = model(pack(sequences), temperature=1.0, chunk_tokens=4).logprobs
    longest_first = [logprob for _, logprob in sorted(expected, key=lambda pair: -pair[0])]
    assert found.tolist() == pytest.approx(longest_first, abs=1e-5)


def test_grouped_query_attention_and_an_untied_head_are_exact(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(tmp_path, tie=False, num_key_value_heads=1)
    model = load_model(folder, ranks=ranks, dtype="float32", activation_checkpointing=False)
    assert_packed_equals_plain(model, folder)


def test_a_sliding_window_is_exact(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(
        tmp_path, use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    )
    model = load_model(folder, ranks=ranks, dtype="float32", activation_checkpointing=False)
    assert_packed_equals_plain(model, folder)


def test_changing_one_sequence_leaves_the_others_alone(model: PackedModel) -> None:
    first, second, other = (random_sequence(20, seed=seed) for seed in (1, 2, 3))
    with torch.no_grad():
        before = logprobs_of(model, [first, second])
        after = logprobs_of(model, [first, other])
    torch.testing.assert_close(before[:17], after[:17], rtol=0, atol=1e-6)
    assert (before[17:] - after[17:]).abs().max() > 0.1


def test_gradients_of_a_pack_are_the_sum_of_its_sequences(model: PackedModel) -> None:
    sequences = [random_sequence(length, seed=length) for length in (9, 13, 40)]
    logprobs_of(model, sequences).sum().backward()
    packed = gradients(model)
    for sequence in sequences:
        logprobs_of(model, [sequence]).sum().backward()
    torch.testing.assert_close(packed, gradients(model), rtol=1e-5, atol=1e-4)


def test_activation_checkpointing_changes_no_gradient(model: PackedModel, folder: Path, ranks: Ranks) -> None:
    frugal = load_model(folder, ranks=ranks, dtype="float32", activation_checkpointing=True)
    sequences = [random_sequence(length, seed=length) for length in (9, 13)]
    logprobs_of(model, sequences).sum().backward()
    logprobs_of(frugal, sequences).sum().backward()
    torch.testing.assert_close(gradients(frugal), gradients(model), rtol=1e-6, atol=1e-6)


def test_bfloat16_keeps_float32_weights_and_logprobs(folder: Path, ranks: Ranks) -> None:
    model = load_model(folder, ranks=ranks, dtype="bfloat16", activation_checkpointing=False)
    sequence = random_sequence(20, seed=4)
    logprobs = logprobs_of(model, [sequence])
    assert logprobs.dtype == torch.float32
    assert {tensor.dtype for _, tensor in full_tensors(model)} == {torch.float32}
    assert (logprobs - plain_logprobs(folder, sequence)).abs().mean() < 0.2


def test_full_tensors_are_those_of_the_folder_and_a_tied_head_comes_once(model: PackedModel, folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    found = dict(full_tensors(model))
    assert found.keys() == saved.keys()
    assert "lm_head.weight" not in found
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


def test_a_saved_folder_loads_in_transformers_with_its_tokenizer(tmp_path: Path, ranks: Ranks) -> None:
    folder, exported = save_tiny_model(tmp_path / "source"), tmp_path / "exported"
    words = Tokenizer(models.WordLevel({"<unk>": 0, "look": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    model = load_model(folder, ranks=ranks, dtype="float32", activation_checkpointing=False)
    save_hf(model, exported, ranks=ranks)
    sequence = random_sequence(12, seed=5)
    torch.testing.assert_close(plain_logprobs(exported, sequence), plain_logprobs(folder, sequence), rtol=0, atol=0)
    assert PreTrainedTokenizerFast.from_pretrained(exported).convert_tokens_to_ids("look") == 1


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, final_logit_softcapping=1.0, initializer_range=0.5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM gives other log-probabilities"):
        load_model(tmp_path, ranks=ranks, dtype="float32", activation_checkpointing=False)


def test_a_folder_without_a_model_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"`model.path` .* has no config.json"):
        load_model(tmp_path, ranks=ranks, dtype="float32", activation_checkpointing=False)


def gradients(model: PackedModel) -> list[Tensor]:
    """Every gradient, whole; they are forgotten in the model."""
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    return found
