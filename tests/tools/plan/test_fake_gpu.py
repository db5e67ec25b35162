"""A step of the learner on fake GPUs: every tensor is on the right device, of the right dtype, and of the right size.

No kernel runs and no value is computed (see `slipstream.tools.plan.fake_device`), so this needs no GPU. All steps run
in one process, as most of its time is the import of torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from slipstream.common.transfer.weights import ALIGN_BYTES
from slipstream.tools.plan.measured_step import MeasuredStep
from tests.processes import Done, python

TOKENS = 64
VOCAB_SIZE = 202  # 8 ranks do not divide it
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
TWO_LAYERS = {"num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DENSE: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | SIZES | HEADS
DENSE |= {"max_position_embeddings": TOKENS, "tie_word_embeddings": False}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": True}
# Split over ranks like every first dimension: more ranks than experts would be idle.
EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
STATES = DENSE | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
STATES |= TWO_LAYERS | {"layer_types": ["linear_attention", "full_attention"]}
STATES |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
STATES |= {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
SINKS = DENSE | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "rope_parameters": ROPE}
SINKS |= TWO_LAYERS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SINKS |= {"num_local_experts": 8, "num_experts_per_tok": 2}
TOGETHER = {"learner": {"ranks": 8, "context_ranks": 4}}
LONG_TOKENS = 8192
LONG = TWO_LAYERS | {"max_position_embeddings": 4 * LONG_TOKENS}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
LORA = {"model": {"lora": {"rank": 8}}}
# What an objective can need besides the policy.
EVERY_MODEL = {"objective": {"advantage": "gae", "critic": "own", "kl_coefficient": 0.1}}


def long_step(sequences: int, tokens: int, **learner: int) -> dict[str, Any]:
    return {"model": {"max_tokens": tokens // sequences}, "learner": {"micro_batch_tokens": tokens, **learner}}


# (architecture, settings, ranks) of each step. More tokens take no more time, as no value is computed.
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "dense on 1": (DENSE, {}, 1),
    "dense on 8": (DENSE | LONG, long_step(2, LONG_TOKENS), 8),
    "experts on 8": (EXPERTS, {}, 8),
    "adapters on 1": (DENSE, LORA, 1),
    "adapters on 8": (DENSE, LORA, 8),
    "states on 8": (STATES, {}, 8),
    "sinks on 8": (SINKS | LONG, long_step(2, LONG_TOKENS), 8),
    "every model on 8": (DENSE, EVERY_MODEL, 8),
    "sinks on 2 times 4": (SINKS | LONG, long_step(2, LONG_TOKENS, **TOGETHER["learner"]), 8),
    "every model on 2 times 4": (DENSE, TOGETHER | EVERY_MODEL, 8),
    "4 times as long on 2 times 4": (DENSE | LONG, long_step(2, 4 * LONG_TOKENS, **TOGETHER["learner"]), 8),
    "offloaded with windows on 8": (DENSE | WINDOWS, {"learner": {"cpu_offload": True}}, 8),
}


# Where a layer's keys and values are largest beside the rest of it: as many heads of them as of queries.
SIBLINGS = (
    DENSE | {"num_key_value_heads": 4, "max_position_embeddings": 512},
    {"model": {"max_tokens": 512}, "learner": {"micro_batch_tokens": 4096, "activation_checkpointing": False}},
)
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
SHARED_STEP = "tests.tools.plan.fake_shared_step"


def write_step(folder: Path, architecture: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(architecture))
    config: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "bfloat16", "max_tokens": TOKENS // 2},
        "sampling": {"max_turn_tokens": 8},
        "learner": {"micro_batch_tokens": TOKENS, "activation_checkpointing": True},
    }
    for section, values in settings.items():
        config[section] = config.get(section, {}) | values
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def run_steps(*arguments: str, module: str = "slipstream.tools.plan.learner_step") -> Done:
    return python("-m", module, *arguments, timeout_s=600.0)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("models")
    arguments = [str(write_step(folder / "siblings", *SIBLINGS)), "8"]
    for name, (architecture, settings, num_ranks) in STEPS.items():
        arguments += [str(write_step(folder / name, architecture, settings)), str(num_ranks)]
    return run_steps(*arguments, str(write_step(folder / "mamba", MAMBA, {})), "8", module=SHARED_STEP)


@pytest.fixture(scope="module")
def measured(done: Done) -> list[MeasuredStep]:
    return [msgspec.json.decode(line, type=MeasuredStep) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def steps(done: Done, measured: list[MeasuredStep]) -> dict[str, MeasuredStep]:
    assert len(measured) == 2 + len(STEPS), done.stderr[-4000:]
    return dict(zip(STEPS, measured[2:], strict=True))


def test_weights_and_moments_are_float32_there_and_the_published_bfloat16(steps: dict[str, MeasuredStep]) -> None:
    on_gpu, on_host = ["torch.float32 on cuda"], ["torch.float32 on cpu"]
    for name, step in steps.items():
        kept = on_host if name.startswith("offloaded") else on_gpu
        assert step.dtypes["weights"] == step.dtypes["moments"] == kept, name
        rounded = ["torch.bfloat16 on cpu" if kept is on_host else "torch.bfloat16 on cuda"]
        assert step.dtypes["published"] == (on_gpu if name.startswith("adapters") else rounded), name
        assert ("memory-efficient" if "sinks" in name else "flash") in step.attention, name
        assert ("parts that carry a state" in step.attention) == (STEPS[name][0] is STATES), name


def test_a_layer_with_a_state_keeps_no_keys(steps: dict[str, MeasuredStep]) -> None:
    states, dense = steps["states on 8"], steps["dense on 8"]
    assert (states.num_attending, states.num_layers, dense.num_attending) == (1, 2, 2)
    assert states.kv_token_bytes == dense.kv_token_bytes / 2 == 2 * 2 * 32 * 2  # K and V, heads, bfloat16


def test_each_rank_has_its_part_of_the_weights(steps: dict[str, MeasuredStep]) -> None:
    for name, step in steps.items():
        architecture, settings, num_ranks = STEPS[name]
        if settings is not LORA and not name.startswith("offloaded"):
            part = 4 * step.num_parameters / num_ranks
            buffer_bytes = 2 * 4 * architecture["head_dim"] // 2  # twice the rotation's inverse frequencies, on each
            # FSDP splits the first dimension: what it does not divide goes to the first ranks, of which this is one.
            assert step.trained_bytes == step.weights_bytes - buffer_bytes, name
            assert part <= step.trained_bytes <= 1.5 * part, name
            assert 0 <= step.published_bytes - 2 * step.num_parameters < 10 * ALIGN_BYTES, name  # of short tensors


def test_only_adapters_are_trained_and_published(steps: dict[str, MeasuredStep]) -> None:
    whole, adapters = steps["dense on 1"], steps["adapters on 1"]
    num_added = adapters.num_parameters - whole.num_parameters
    assert adapters.trained_bytes == adapters.published_bytes == 4 * num_added
    assert steps["adapters on 8"].trained_bytes == adapters.trained_bytes / 8


def test_offloaded_weights_and_moments_are_on_the_host(steps: dict[str, MeasuredStep]) -> None:
    step = steps["offloaded with windows on 8"]
    assert step.offloaded_bytes >= 3 * step.trained_bytes
    assert step.weights_bytes < step.trained_bytes


def test_critic_and_reference_are_counted(steps: dict[str, MeasuredStep]) -> None:
    one, every = steps["dense on 1"], steps["every model on 8"]
    head = 4 * VOCAB_SIZE * DENSE["hidden_size"] / 8  # a critic has none
    # A critic with two moments, and a reference.
    assert every.other_models_bytes == pytest.approx(4 * every.trained_bytes - 3 * head, rel=0.02)
    assert one.other_models_bytes == 0


def test_a_step_needs_weights_gradient_and_moments_and_more(steps: dict[str, MeasuredStep]) -> None:
    for name, step in steps.items():
        kept = step.weights_bytes + 3 * step.trained_bytes + step.other_models_bytes
        assert step.step_peak_bytes > (0 if name.startswith("offloaded") else kept), name


def test_context_ranks_divide_what_a_micro_batch_takes_and_nothing_else(steps: dict[str, MeasuredStep]) -> None:
    for name in ("sinks", "every model"):
        alone, together = steps[f"{name} on 8"], steps[f"{name} on 2 times 4"]
        assert together.step_peak_bytes < alone.step_peak_bytes, name
        assert together.weights_bytes == alone.weights_bytes, name
        assert together.other_models_bytes == alone.other_models_bytes, name
        assert together.waits == alone.waits, name


def test_a_sequence_that_one_rank_cannot_hold_fits_four(steps: dict[str, MeasuredStep]) -> None:
    """Activations are nearly all of the memory: four times as many tokens on four ranks take about as much."""
    assert steps["4 times as long on 2 times 4"].step_peak_bytes < 1.2 * steps["dense on 8"].step_peak_bytes


def test_no_matrix_of_all_scores_of_each_head_is_made(steps: dict[str, MeasuredStep]) -> None:
    """With sinks all heads share a mask; in the queries' dtype it is for all heads as large as one head's scores."""
    scores_bytes = 2 * SINKS["num_attention_heads"] * (LONG_TOKENS // 2) ** 2  # of one of two sequences
    assert steps["sinks on 8"].step_peak_bytes < steps["dense on 8"].step_peak_bytes + scores_bytes


def test_the_host_waits_for_the_gpu_only_at_the_end_of_a_step(steps: dict[str, MeasuredStep]) -> None:
    """Else the GPU would be idle between micro-batches."""
    at_the_end = ("learner/step/step_metrics.py", "ranks.py (summed)", "guard.py", "model/gradient.py")
    at_the_end += ("(_both_finite)", "learner/step/clock.py (lap)")
    for name, step in steps.items():
        elsewhere = [place for place in step.waits if not any(end in place for end in at_the_end)]
        assert not elsewhere, f"{name}: {elsewhere}"


def test_a_pack_of_siblings_takes_no_more_memory_than_one_of_separate_sequences(measured: list[MeasuredStep]) -> None:
    full, shared = measured[:2]
    assert shared.step_peak_bytes < full.step_peak_bytes
    assert shared.waits.keys() == full.waits.keys()


def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(done: Done) -> None:
    assert done.returncode == 2 and "state" in done.stderr.splitlines()[-1], done.stderr
