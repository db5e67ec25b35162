"""The families of causal LMs that transformers ships: packed rows are exact, or the model is refused with the reason.

docs/models.md lists both, and is compared with the tables here.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.attention import CannotPack
from slipstream.learner.model.flops import flops_of
from slipstream.learner.model.kernel import PACKED_ATTENTION
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, check_packing, load_model
from slipstream.learner.model.skeleton import auto_class
from slipstream.learner.model.weight_shards import full_tensors, whole
from slipstream.learner.ranks.ranks import Ranks
from tests.learner.devices import relative_error
from tests.tools.run.tiny_model import FLOAT32, VOCAB_SIZE, random_sequence

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
ORIGINAL = 16  # the context before it was stretched
CONTEXT = 64
LENGTHS = (40, 37, 23, 9)  # three of them beyond the original context, and all but one beyond every window
WINDOW = 6


@dataclass(frozen=True)
class Family:
    """A tiny model of an architecture: what its configuration has besides, or instead of, `COMMON`."""

    model_type: str  # as transformers calls it
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # keys of `COMMON` that it cannot take


SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": CONTEXT}
COMMON = SIZES | HEADS | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 2}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CHUNKED = EXPERTS | {"attention_chunk_size": 8, "intermediate_size_mlp": 48}
INDEXED = ROUTED | LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Else each layer has an embedding of its own of 262,144 tokens, half a gigabyte in all.
EMBEDDED_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}


def rope(rope_type: str, **parameters: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


def longrope(num_frequencies: int = 8, **parameters: object) -> dict[str, Any]:
    factors = {
        "short_factor": [1.0 + 0.1 * place for place in range(num_frequencies)],
        "long_factor": [1.5 + place for place in range(num_frequencies)],
    }
    scaled = rope("longrope", original_max_position_embeddings=ORIGINAL, **factors, **parameters)
    return scaled | {"original_max_position_embeddings": ORIGINAL}  # where Phi-3 has it


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def each_of(names: str, **settings: object) -> dict[str, Family]:
    """Families that are named as transformers calls them."""
    return {name: Family(name, settings) for name in names.split()}


EXACT = {
    # rotary positions: every kind of scaling
    "llama, linear": Family("llama", rope("linear", factor=4.0)),
    "llama, yarn": Family("llama", rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "llama, llama3": Family("llama", rope("llama3", **LLAMA3)),
    "llama, dynamic within its context": Family("llama", rope("dynamic", factor=4.0)),
    "hunyuan, dynamic by alpha in its context": Family("hunyuan_v1_dense", rope("dynamic", factor=1.0, alpha=1000.0)),
    # rotary positions of a part of each head, biases, norms of queries and keys
    **each_of("llama qwen2 qwen3 phi phi3 gpt_neox persimmon olmo olmo2 granite"),
    **each_of("smollm3 glm glm4 gemma seed_oss ernie4_5 helium apertus arcee bitnet"),
    **each_of("diffllama", num_key_value_heads=2),
    # logits that are scaled
    "granite, scaled logits": Family("granite", {"logits_scaling": 2.0}),
    **each_of("cohere", logit_scale=0.5),
    **each_of("cohere2", sliding_window=WINDOW, logit_scale=0.5),
    **each_of("minicpm3", **LATENT, dim_model_base=16),
    # sliding windows
    **each_of("mistral starcoder2", sliding_window=WINDOW),
    **each_of("ministral olmo3 exaone4", **WINDOWED),
    **each_of("ministral3"),
    "gemma2, nothing capped": Family(
        "gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3": Family("gemma3_text", WINDOWED),
    "gemma4": Family("gemma4_text", WINDOWED | EMBEDDED_PER_LAYER),
    **each_of("afmoe", **EXPERTS, sliding_window=WINDOW, n_group=1, topk_group=1),
    # experts
    **each_of("mixtral qwen2_moe qwen3_moe phimoe olmoe granitemoe minimax_m2", **EXPERTS),
    **each_of("glm4_moe dots1", **ROUTED),
    # a sink in the attention of each head
    **each_of("gpt_oss", **(EXPERTS | rope("default") | WINDOWED)),
    # keys and values from a latent vector
    **each_of("deepseek_v2", **(ROUTED | LATENT)),
    "deepseek_v3": Family("deepseek_v3", ROUTED | LATENT, without=("head_dim",)),
    # learned positions
    **each_of("gpt2 gpt_bigcode", **LIKE_GPT2),
    **each_of("opt", ffn_dim=48, word_embed_proj_dim=32),
    **each_of("biogpt"),
}
# Which of them are not in CI, where another has what they have.
AS_OTHERS = "phi gpt_neox persimmon olmo olmo2 granite smollm3 glm gemma seed_oss ernie4_5 helium apertus arcee bitnet"
AS_OTHERS += " cohere starcoder2 ministral olmo3 exaone4 ministral3 qwen2_moe phimoe olmoe granitemoe minimax_m2 dots1"
AS_OTHERS += " deepseek_v2 gpt_bigcode biogpt lfm2_moe qwen3_5_moe olmo_hybrid bamba falcon_h1"


def in_ci(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) if name in AS_OTHERS.split() else name for name in names]


# Layers with a state take each sequence alone.
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16}
MAMBA |= {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16}
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
STATEFUL = {
    "qwen3_5": Family("qwen3_5_text", LINEAR),
    "qwen3_5_moe": Family("qwen3_5_moe_text", EXPERTS | LINEAR),
    **each_of("qwen3_next", **EXPERTS, **LINEAR),
    **each_of("olmo_hybrid", **LINEAR, num_key_value_heads=2),
    **each_of("lfm2", **CONVOLVED),
    **each_of("lfm2_moe", **EXPERTS, **CONVOLVED),
    **each_of("jamba", num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1),
    **each_of("bamba", **MAMBA, attn_layer_indices=[1]),
    **each_of("granitemoehybrid", **EXPERTS, **MAMBA, layer_types=["mamba", "attention"], shared_intermediate_size=16),
    **each_of("falcon_h1", **MAMBA, mamba_d_ssm=64),
    **each_of("nemotron_h", **NEMOTRON, layers_block_type=["mamba", "attention"]),
}


def seeing(name: str, text: dict[str, Any], images: dict[str, Any], **others: object) -> dict[str, Family]:
    """A vision-language model: the configuration of its text has COMMON, and `others` are beside both."""
    images = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14} | images
    return each_of(name, text_config=COMMON | text, vision_config=images, **others)


GEMMA_IMAGES = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
QWEN_IMAGES = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
QWEN_IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
QWEN2_5 = rope("default", mrope_section=[2, 3, 3])
QWEN3_5 = LINEAR | rope("default", mrope_section=[2, 3, 3], partial_rotary_factor=1.0)
SEEING = {
    **seeing("gemma3", WINDOWED, GEMMA_IMAGES, mm_tokens_per_image=4, image_token_index=3),
    **seeing("qwen2_5_vl", QWEN2_5, QWEN_IMAGES | {"fullatt_block_indexes": [0]}, **QWEN_IDS),
    **seeing("qwen3_5", QWEN3_5, QWEN_IMAGES | {"num_position_embeddings": 16}, **QWEN_IDS),
}

STATE, OWN_CODE = "carry a state from token to token", "its attention is its own code"
LOST_BOUNDS, DIFFERS = "do not pass the sequence bounds on to the attention", "gives other log-probabilities"


def refused(reason: str, families: dict[str, Family]) -> dict[str, tuple[Family, str]]:
    return {name: (family, reason) for name, family in families.items()}


REFUSED = {
    # frequencies by length
    "llama, dynamic beyond its context": (
        Family("llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL}),
        r"`model.max_tokens` must be <= 16 for a model with rope_type dynamic, got 64 .*; lower it",
    ),
    "longrope that scales attention otherwise than vLLM": (
        Family("llama", longrope(attention_factor=1.5)),
        "its longrope scales attention by 1.5 in transformers",
    ),
    "phimoe, longrope": (
        Family("phimoe", EXPERTS | longrope(short_mscale=1.0, long_mscale=1.2)),
        "short_mscale and long_mscale",
    ),
    # more in the attention than scores of queries and keys
    **refused("its attention needs softcap", each_of("gemma2", sliding_window=WINDOW)),
    **refused("its attention needs attention_mask", each_of("doge")),
    "llama4": (Family("llama4_text", CHUNKED), "attends within chunks of a sequence"),
    "deepseek_v32": (Family("deepseek_v32", INDEXED, without=("head_dim",)), "tokens that an index of its own chooses"),
    # logits that are capped
    **refused(DIFFERS, each_of("nanochat")),
    # attention that cannot be replaced, or that does not get the sequence bounds
    **refused(
        OWN_CODE,
        each_of("bloom", n_head=2, n_layer=2)
        | each_of("mpt", d_model=32, n_heads=2, n_layers=2, max_seq_len=CONTEXT)
        | each_of("gpt_neo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
        | each_of("openai-gpt", **LIKE_GPT2)
        | each_of("xglm", d_model=32, num_layers=2, attention_heads=2)
        | {
            "falcon": Family("falcon", without=("head_dim",)),
            "falcon, alibi": Family("falcon", {"alibi": True}, without=("head_dim",)),
        },
    ),
    **refused(LOST_BOUNDS, each_of("stablelm nemotron")),
    # states and convolutions that run on into the next sequence
    **refused(
        STATE,
        each_of("mamba falcon_mamba", state_size=8)
        | each_of("mamba2", state_size=8, num_heads=4, n_groups=1)
        | each_of("rwkv", attention_hidden_size=32)
        | each_of("recurrent_gemma", attention_window_size=16),
    ),
}


# Their attention is their own code up to transformers 5.23; 5.24 can replace it.
REFUSED_BEFORE = each_of("gptj codegen", **LIKE_GPT2, rotary_dim=8)


def save(family: Family, folder: Path) -> Path:
    """Write a model with random weights, biases and norms included, large enough that nothing of it goes unseen."""
    torch.manual_seed(0)
    common = {} if "text_config" in family.settings else COMMON
    settings = {name: value for name, value in common.items() if name not in family.without} | family.settings
    config = AutoConfig.for_model(family.model_type, **settings)
    causal_lm = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    causal_lm.save_pretrained(folder)
    return folder


def load(folder: Path, ranks: Ranks, **changes: object) -> PackedModel:
    settings = dataclasses.replace(FLOAT32, **({"max_tokens": CONTEXT} | changes))
    return load_model(folder, ranks=ranks, settings=settings)


def load_adapted(folder: Path, ranks: Ranks) -> PackedModel:
    return load(folder, ranks, lora=LoraConfig(rank=2))


@torch.no_grad()
def alone(folder: Path, *sequences: TokenSequence) -> list[Tensor]:
    """By transformers, each from a model that has seen no other sequence."""
    unused = plain(folder)
    return [plain_logprobs(copy.deepcopy(unused), sequence) for sequence in sequences]


def plain(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, attn_implementation="eager")


def plain_logprobs(causal_lm: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    tokens = torch.from_numpy(sequence.tokens).long()
    table: Tensor = causal_lm(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    return table[:-1].gather(1, tokens[1:, None]).squeeze(1)


def assert_exact(model: PackedModel, folder: Path, lengths: tuple[int, ...]) -> None:
    """With all tokens computed, and with the prefix that all sequences share computed once, if the model can."""
    drawn = [random_sequence(length, seed=length, prompt=1) for length in lengths]
    num_shared = min(lengths) - 2
    sequences = [
        dataclasses.replace(each, tokens=np.concatenate([drawn[0].tokens[:num_shared], each.tokens[num_shared:]]))
        for each in drawn
    ]
    expected = dict(zip((each.tokens.tobytes() for each in sequences), alone(folder, *sequences), strict=True))
    assert torch.cat(list(expected.values())).std() > 0.5
    for share_prefixes in (False, True)[: 1 + model.shares_prefixes]:
        packed = pack(sequences, share_prefixes=share_prefixes)
        assert share_prefixes == (sum(packed.computed_lengths) == sum(lengths) - (len(lengths) - 1) * num_shared)
        with torch.no_grad():
            found = model(packed).logprobs
        order = [part.int().numpy().tobytes() for part in torch.split_with_sizes(packed.tokens, packed.lengths)]
        torch.testing.assert_close(found, torch.cat([expected[tokens] for tokens in order]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", in_ci(EXACT))
def test_packs_get_the_logprobs_that_the_family_gives_each_alone(name: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = save(EXACT[name], tmp_path)
    model = load(folder, ranks)
    assert model.shares_prefixes and not model.carries_state
    assert_exact(model, folder, LENGTHS)


@pytest.mark.parametrize("name", in_ci(STATEFUL))
def test_layers_with_a_state_take_a_sequence_alone_and_share_no_prefix(name: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = save(STATEFUL[name], tmp_path)
    model = load(folder, ranks)
    assert model.carries_state and not model.shares_prefixes
    assert_exact(model, folder, LENGTHS)
    siblings = [random_sequence(9, seed=0)] * 2
    with pytest.raises(ValueError, match="cannot share prefixes"):
        model(pack(siblings, share_prefixes=True))


# Grouped queries; with a window; with experts; with sinks; with layers that carry a state.
ON_A_GPU = {name: (EXACT | STATEFUL)[name] for name in ("qwen3", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_5")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_packs_on_a_device_have_the_logprobs_and_the_gradient_of_float32_on_the_cpu(
    name: str, dtype: str, tmp_path: Path, device: torch.device, ranks: Ranks
) -> None:
    folder = save(ON_A_GPU[name], tmp_path)
    model, causal_lm = load(folder, ranks, dtype=dtype), plain(folder)
    sequences = [random_sequence(length, seed=length, prompt=1) for length in LENGTHS]
    found = model(pack(sequences).to(device)).logprobs
    expected = torch.cat([plain_logprobs(causal_lm, each) for each in sequences])
    torch.autograd.backward([found.sum(), expected.sum()])
    mine = torch.cat([whole(parameter.grad).cpu().flatten() for parameter in model.causal_lm.parameters()])
    theirs = torch.cat([parameter.grad.flatten() for parameter in causal_lm.parameters()])
    error = (found.detach().cpu() - expected.detach()).abs()
    if dtype == "float32":
        assert error.max() <= 1e-3
        assert relative_error(mine, theirs) <= 5e-3
    else:  # these weights are large, and a token whose router nearly ties may go to other experts
        assert error.mean() <= 0.1
        assert relative_error(mine, theirs) <= 0.8


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "nemotron_h", "granitemoehybrid"])
def test_adapters_of_layers_with_a_state_learn(name: str, tmp_path: Path, ranks: Ranks) -> None:
    adapted = load_adapted(save(STATEFUL[name], tmp_path), ranks)
    adapted(pack([random_sequence(length, seed=length) for length in LENGTHS])).logprobs.sum().backward()
    names = adapters_of(adapted.causal_lm)
    assert any(kind in name for name in names for kind in ("linear_attn.", "conv.", "mamba.", "mixer."))
    assert not any(kind in name for name in names for kind in ("mamba.out_proj", "mixer.out_proj"))
    assert all(whole(adapter.up.grad).any() for adapter in adapters_of(adapted.causal_lm).values())


# Linear layers: with biases, fused, transposed, beside experts and routers, of layers with a state, of a vision model.
ADAPTED = ["qwen3", "qwen2", "phi3", "gpt2", "qwen2_moe", "gpt_oss", "afmoe", "deepseek_v3"]
ADAPTED += ["nemotron_h", "qwen3_next", "qwen2_5_vl"]


@pytest.mark.parametrize("name", ADAPTED)
def test_merged_adapters_give_the_learners_logprobs_in_transformers(name: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = save((EXACT | STATEFUL | SEEING)[name], tmp_path / "base")
    adapted, sequence = load_adapted(folder, ranks), random_sequence(23, seed=1, prompt=1)
    (before,) = alone(folder, sequence)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for adapter in adapters_of(adapted.causal_lm).values():  # as if trained
            for part in (adapter.down, adapter.up):
                part.to_local().normal_(std=0.2, generator=generator)
        found = adapted(pack([sequence])).logprobs
    merged = load_file(folder / "model.safetensors") | dict(full_tensors(adapted))
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(found, *alone(folder, sequence), rtol=0, atol=1e-3)
    assert (found - before).abs().max() > 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_through_states_are_the_sum_over_sequences(recompute: bool, tmp_path: Path, ranks: Ranks) -> None:
    folder = save(STATEFUL["qwen3_5"], tmp_path)
    model, causal_lm = load(folder, ranks, activation_checkpointing=recompute), plain(folder)
    sequences = [random_sequence(length, seed=length, prompt=1) for length in LENGTHS]
    loss = model(pack(sequences)).logprobs.sum()
    with torch.no_grad():
        model(pack(sequences[2:]))  # other rows than those that the backward pass needs
    loss.backward()
    torch.stack([plain_logprobs(causal_lm, each).sum() for each in sequences]).sum().backward()
    expected = dict(causal_lm.named_parameters())
    for name, parameter in model.causal_lm.named_parameters():
        gradient = expected[name].grad
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_language_folder_is_trained_for_text_and_kept_whole(name: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = save(SEEING[name], tmp_path)
    model = load(folder, ranks)
    assert_exact(model, folder, LENGTHS)
    frozen = {name for name, parameter in model.causal_lm.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.causal_lm.named_parameters() if "vis" in name or "projector" in name}
    assert frozen
    stored = load_file(folder / "model.safetensors")
    published = dict(full_tensors(model))
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())
    assert flops_of(model, device=torch.device("cpu"), num_ranks=1).per_token > 0
    adapted = adapters_of(load_adapted(folder, ranks).causal_lm)
    assert adapted.keys() <= {name for name, _ in model.causal_lm.named_parameters()} - frozen


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_with_the_reason(name: str, tmp_path: Path, ranks: Ranks) -> None:
    family, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason) as refused:
        load(save(family, tmp_path), ranks)
    assert re.match(r"`model\.(path|max_tokens)` ", str(refused.value))


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_a_family_whose_attention_only_a_newer_transformers_can_replace_is_refused_or_exact(
    name: str, tmp_path: Path, ranks: Ranks
) -> None:
    folder = save(REFUSED_BEFORE[name], tmp_path)
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24):
        with pytest.raises(ConfigError, match=OWN_CODE):
            load(folder, ranks)
    else:
        assert_exact(load(folder, ranks), folder, LENGTHS)


LONGROPES = {
    "llama": Family("llama", longrope()),
    # Phi-4-mini: rotary positions of three quarters of each head
    "phi3": Family("phi3", longrope(6, partial_rotary_factor=0.75)),
}


@pytest.mark.parametrize("name", LONGROPES)
def test_longrope_factors_are_long_only_if_a_sequence_may_outgrow_it(name: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = save(LONGROPES[name], tmp_path / "model")
    assert_exact(load(folder, ranks, max_tokens=ORIGINAL), folder, (16, 15, 9))
    model = load(folder, ranks, max_tokens=ORIGINAL + 1)
    assert_exact(model, folder, tuple(length for length in LENGTHS if length > ORIGINAL))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_exact(model, folder, LENGTHS)


@pytest.mark.parametrize("max_tokens", [ORIGINAL, ORIGINAL + 1])
def test_longrope_turns_queries_and_keys_as_vllm_does_with_that_max_model_len(
    max_tokens: int, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as theirs  # slow to import

    configured = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_tokens))
    monkeypatch.setattr(theirs, "get_current_vllm_config", lambda: configured)
    model = load(save(LONGROPES["phi3"], tmp_path), ranks, max_tokens=max_tokens)
    factors = {name: longrope(6)["rope_parameters"][name] for name in ("short_factor", "long_factor")}
    rotary = theirs.Phi3LongRoPEScaledRotaryEmbedding(16, 12, CONTEXT, ORIGINAL, 1e4, True, torch.float32, **factors)
    positions = torch.arange(max_tokens)
    queries, keys = torch.randn(2, 1, 2, max_tokens, 16)  # of 2 heads
    cos, sin = model.causal_lm.model.rotary_emb(queries, positions[None])
    found = apply_rotary_pos_emb(queries, keys, cos, sin)
    flat = [turned[0].transpose(0, 1).flatten(1) for turned in (queries, keys)]
    expected = [turned.unflatten(1, (2, 16)).transpose(0, 1)[None] for turned in rotary(positions, *flat)]
    torch.testing.assert_close(found, tuple(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [longrope(), rope("dynamic", factor=4.0)], ids=["longrope", "dynamic"])
def test_frequencies_by_length_need_the_longest_sequence(change: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    folder = save(Family("llama", change), tmp_path)
    with pytest.raises(ConfigError, match="`max_tokens` must be given for a model with rope_type"):
        load_model(folder, ranks=ranks, settings=FLOAT32)


def test_a_window_that_is_not_passed_on_is_seen(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(Family("qwen3", WINDOWED | {"sliding_window": 50, "use_sliding_window": True}), tmp_path)
    model = load(folder, ranks)
    assert model.causal_lm.config.sliding_window == 50
    passed_on = property(lambda layer: None, lambda layer, width: None)
    monkeypatch.setattr(Qwen3Attention, "sliding_window", passed_on, raising=False)
    with pytest.raises(ConfigError, match=DIFFERS):
        load(folder, ranks)


def test_the_check_sees_that_a_long_sequence_changes_a_short_one(tmp_path: Path, ranks: Ranks) -> None:
    folder = save(EXACT["llama, dynamic within its context"], tmp_path)
    load(folder, ranks)
    settings = {"dtype": torch.float32, "attn_implementation": PACKED_ATTENTION}
    short = dataclasses.replace(FLOAT32, max_tokens=CONTEXT)
    model = PackedModel(AutoModelForCausalLM.from_pretrained(folder, **settings), folder=folder, settings=short).eval()
    check_packing(model)
    model.settings = dataclasses.replace(short, max_tokens=4 * CONTEXT)
    with pytest.raises(CannotPack, match=DIFFERS):
        check_packing(model)


def test_the_docs_list_every_family_of_these_tables_as_it_is() -> None:
    lists = DOCS.read_text().split("\n**Exact**")[1].split("\nAn architecture that is on neither list")[0]
    listed = [set(re.findall(r"`([\w-]+)`", part)) for part in lists.split("\n**Refused**")]
    exact = {family.model_type for table in (EXACT, LONGROPES, STATEFUL, SEEING) for family in table.values()}
    refused = [*(family for family, _ in REFUSED.values()), *REFUSED_BEFORE.values()]
    assert listed == [exact, {family.model_type for family in refused} - exact]
