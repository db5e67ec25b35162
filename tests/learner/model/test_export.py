"""The folder that leaves the learner: whole in one file or in several, and what vLLM makes of it."""

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from vllm import SamplingParams
from vllm.config import ModelConfig

from slipstream.common.config.model_config import LoraConfig
from slipstream.common.config.replay_config import SamplingConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Sampling
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model import probe_score
from slipstream.learner.model.export import save_adapters, save_hf, write_sampling
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.vllm_engines import started
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.full_disk import largest_file
from tests.learner.model.test_model_families import EXACT, save
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model

TRANSFORMERS_4 = os.environ.get("SLIPSTREAM_TRANSFORMERS_4", "")
ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
}
PROMPT = [7, 30, 12, 45, 50, 8, 39, 23]


def loaded(folder: Path, ranks: Ranks, *, lora_rank: int = 0) -> PackedModel:
    return load_model(folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=LoraConfig(rank=lora_rank)))


def test_a_folder_in_several_files_holds_what_one_file_does(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(tmp_path / "source", tie=False)
    merging_tokenizer(CHATML).save_pretrained(folder)
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(folder)
    model = loaded(folder, ranks)
    # embedding and head are 51,200 bytes each, no layer's tensor is above 32,768
    save_hf(model, tmp_path / "export", ranks=ranks, max_file_bytes=60_000)
    files = {path.name: load_file(path) for path in (tmp_path / "export").glob("*.safetensors")}
    assert len(files) > 4
    assert all(sum(tensor.nbytes for tensor in held.values()) <= 60_000 for held in files.values())
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for held in files.values() for tensor in held.values())
    assert GenerationConfig.from_pretrained(tmp_path / "export").temperature == 0.6

    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    expected = dict(full_tensors(model))
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)

    save_hf(model, tmp_path / "export", ranks=ranks)  # over the one in several files
    assert [path.name for path in (tmp_path / "export").glob("*.safetensors*")] == ["model.safetensors"]
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == index["weight_map"].keys()


def test_an_export_to_a_full_disk_names_the_file_and_does_not_look_whole(tmp_path: Path, ranks: Ranks) -> None:
    model = loaded(save_tiny_model(tmp_path / "source"), ranks, lora_rank=2)
    save_hf(model, tmp_path / "export", ranks=ranks)
    for write, name in ((save_hf, "model"), (save_adapters, "adapter_model")):
        with largest_file(bytes_allowed=10_000), pytest.raises(ValueError, match=rf"/{name}\.safetensors: .*free disk"):
            write(model, tmp_path / "export", ranks=ranks)
    assert not (tmp_path / "export" / "config.json").exists()


def save_source(folder: Path, *, rope: str, form: int) -> Path:
    """A tiny model in bfloat16, with the files that transformers of major version `form` writes."""
    save_tiny_model(folder, rope_parameters={"rope_theta": 1e6, "rope_type": rope, **ROPES[rope]}, bos_token_id=1)
    merging_tokenizer(CHATML).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    if form == 4:
        config = {"torch_dtype": config.pop("dtype"), **config}
        theta, scaling = config["rope_parameters"].pop("rope_theta"), config.pop("rope_parameters")
        config |= {"rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|im_start|>"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    return folder


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("form", [4, 5])
def test_a_folder_has_the_files_of_its_source_and_the_keys_that_both_versions_of_transformers_read(
    tmp_path: Path, ranks: Ranks, rope: str, form: int
) -> None:
    source, export = save_source(tmp_path / "source", rope=rope, form=form), tmp_path / "export"
    save_hf(loaded(source, ranks), export, ranks=ranks)
    before, after = ({path.name: path.read_bytes() for path in each.glob("*.j*")} for each in (source, export))
    assert after.keys() == before.keys() > {"chat_template.jinja", "generation_config.json", "tokenizer.json"}
    edited = {"config.json", "tokenizer_config.json"} if form == 5 else {"config.json"}
    assert {name for name in after if after[name] != before[name]} == edited
    if form == 4:
        assert after["config.json"] == before["config.json"].replace(b'"bfloat16"', b'"float32"')
    config = json.loads(after["config.json"])
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    assert config["rope_theta"] == 1e6 and scaling == {"rope_type": rope, **ROPES[rope]}
    assert json.loads(after["tokenizer_config.json"])["tokenizer_class"] == "PreTrainedTokenizerFast"


# Each of version 5 starts a process; in CI, one of each form does.
IN_CI = (("yarn", 4), ("llama3", 5))
LOADED = [
    pytest.param(rope, form, version, marks=[pytest.mark.long] if version == 5 and (rope, form) not in IN_CI else [])
    for rope in ROPES
    for form in (4, 5)
    for version in (4, 5)
]


@pytest.mark.parametrize(("rope", "form", "version"), LOADED)
def test_every_version_of_transformers_computes_with_a_folder_what_the_learner_does(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, rope: str, form: int, version: int
) -> None:
    if version == 4:
        if not TRANSFORMERS_4:
            pytest.skip("needs SLIPSTREAM_TRANSFORMERS_4, a folder with transformers 4: make test-transformers-4")
        monkeypatch.setattr(probe_score, "READER", "learner.model.reader")  # a module that needs none of ours
        monkeypatch.setenv("PYTHONPATH", f"{TRANSFORMERS_4}:{Path(__file__).parents[3]}")
    model, result = loaded(save_source(tmp_path / "source", rope=rope, form=form), ranks), tmp_path / "export_check.txt"
    save_hf(model, tmp_path / "export", ranks=ranks)
    probe_score.check_export(model, tmp_path / "export", ranks=ranks)
    assert result.read_text().startswith(f"loaded by transformers {version}.")


NO_ROPE = {"rope_theta": 10_000.0, "rope_scaling": None, "rope_parameters": None}
OTHER_LOGPROBS = r"differs from the learner by .* nats a token, .* at most \(allowed: 0.002 and 0.02\); compare"


@pytest.mark.parametrize(
    ("file", "changes", "fault"),
    [
        ("config.json", NO_ROPE, OTHER_LOGPROBS),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "encodes .* otherwise than the tokenizer in"),
        ("config.json", {"architectures": ["NoSuchModel"]}, "does not load in a fresh process: .*NoSuchModel"),
    ],
    ids=["rope", "tokens", "class"],
)
def test_a_folder_that_is_another_model_is_a_fault_that_says_how(
    tmp_path: Path, ranks: Ranks, file: str, changes: dict[str, object], fault: str
) -> None:
    source, export = save_source(tmp_path / "source", rope="default", form=4), tmp_path / "export"
    model = loaded(source, ranks)
    save_hf(model, export, ranks=ranks)
    (export / file).write_text(json.dumps(json.loads((export / file).read_text()) | changes))
    with pytest.raises(ConfigError, match=f"(?s)^the export {export}.*{fault}"):
        probe_score.check_export(model, export, ranks=ranks)
    assert not (tmp_path / "export_check.txt").exists()


@pytest.mark.parametrize("has_settings", [True, False])
def test_a_folders_own_settings_sample_as_training_did(tmp_path: Path, ranks: Ranks, has_settings: bool) -> None:
    folder = save_tiny_model(tmp_path / "source", tie=False)
    merging_tokenizer(CHATML).save_pretrained(folder)
    if has_settings:
        settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
        GenerationConfig(**settings, eos_token_id=[1, 5]).save_pretrained(folder)
    model, export = loaded(folder, ranks), tmp_path / "export"
    save_hf(model, export, ranks=ranks)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.9, top_k=64)):
        write_sampling(model, export, sampling)
        found = GenerationConfig.from_pretrained(export)
        assert found.eos_token_id == ([1, 5] if has_settings else model.causal_lm.config.eos_token_id)
        assert found.do_sample and found.repetition_penalty in (None, 1.0)
        assert (found.temperature, found.top_p, found.top_k) == (sampling.temperature, sampling.top_p, sampling.top_k)
        of_the_server = ModelConfig(str(export), generation_config="auto").get_diff_sampling_param()
        in_vllm = SamplingParams(**{name: of_the_server[name] for name in of_the_server if name != "max_tokens"})
        assert (in_vllm.temperature, in_vllm.top_p) == (sampling.temperature, sampling.top_p)
        assert in_vllm.top_k == sampling.top_k and in_vllm.repetition_penalty == 1.0


def test_a_model_with_its_experts_as_one_tensor_is_written_as_its_folder_was(tmp_path: Path, ranks: Ranks) -> None:
    save(EXACT["qwen3_moe"], tmp_path / "source")
    merging_tokenizer(CHATML).save_pretrained(tmp_path / "source")
    save_hf(loaded(tmp_path / "source", ranks), tmp_path / "export", ranks=ranks)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "source"))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


async def test_vllm_says_greedily_what_the_trained_learner_thinks_likeliest(tmp_path: Path, ranks: Ranks) -> None:
    texts = [a + b for a in "abcdefghij" for b in "abcdefghij"]
    make_tiny_model(tmp_path / "source", texts=texts, shape=TinyShape(), max_tokens=128, seed=3)
    model = loaded(tmp_path / "source", ranks, lora_rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in adapters_of(model.causal_lm).values():  # as if trained
            adapter.up.to_local().normal_(std=0.2, generator=generator)
    save_hf(model, tmp_path / "export", ranks=ranks, max_file_bytes=200_000)
    engine = started(tmp_path / "export", kv_policy="keep", model={"max_tokens": 128}, max_episodes=2)
    try:
        async with asyncio.timeout(300):
            greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_turn_tokens=12)
            completion = await engine.generate(PROMPT, greedy)
    finally:
        await engine.close()
    tokens, recorded = completion.tokens, completion.logprobs
    assert len(tokens) >= 8
    for position, token in enumerate(tokens):
        logprobs = next_logprobs(model, [*PROMPT, *tokens[:position]])
        assert logprobs.max() - logprobs[token] < 1e-3  # a tie may go either way
        assert abs(logprobs[token] - recorded[position]) < 1e-3
    first = next_logprobs(loaded(tmp_path / "source", ranks), PROMPT)
    assert abs(first[tokens[0]] - recorded[0]) > 0.1  # the adapters' doing


@torch.no_grad()
def next_logprobs(model: PackedModel, context: list[int]) -> torch.Tensor:
    """The learner's log-probability of every token of the vocabulary after `context`, one sequence for each."""
    loss_mask = np.arange(len(context) + 1) == len(context)
    sequences = [TokenSequence.bare([*context, token], loss_mask) for token in range(model.vocab_size)]
    return model(pack(sequences)).logprobs
