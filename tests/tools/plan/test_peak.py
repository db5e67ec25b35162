"""The peak memory of a step: what `slipstream plan` finds on a fake GPU is what a GPU takes."""

import gc
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, load_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.tools.plan.full_pack import full_pack
from slipstream.tools.plan.measured_step import MeasuredStep
from tests.tools.plan.test_fake_gpu import run_steps

# The config.json of Qwen2.5-1.5B, as published.
QWEN: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
QWEN |= {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936}
QWEN |= {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131_072}
QWEN |= {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
MAX_TOKENS = 8192
# In bytes, by the tokens of a micro-batch. A fake GPU needs PyTorch's build for CPUs, and a GPU the one for CUDA.
PLANNED = {8192: 31_732_979_490, 32_768: 37_085_962_628}
OBJECTIVE = ObjectiveConfig(correction="none", max_negative_kl=0, guard=False)


def write_model(folder: Path, *, num_layers: int, num_tokens: int) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": num_layers}))
    settings = [f"model.path={folder}", "model.dtype=bfloat16", f"model.max_tokens={MAX_TOKENS}"]
    settings += [f"learner.micro_batch_tokens={num_tokens}", "learner.activation_checkpointing=true"]
    return load_config(None, settings)


@pytest.mark.long
def test_the_peaks_that_a_gpu_is_compared_with_are_those_of_the_plan(tmp_path: Path) -> None:
    """Each decoder layer adds as many bytes: two and three layers give the peak of all, in a fraction of the time."""
    arguments = []
    for num_layers in (2, 3):
        for num_tokens in PLANNED:
            path = tmp_path / f"{num_layers}-{num_tokens}.yaml"
            config = write_model(tmp_path / str(num_layers), num_layers=num_layers, num_tokens=num_tokens)
            path.write_text(dump_config(config))
            arguments += [str(path), "1"]
    done = run_steps(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    peaks = [msgspec.json.decode(line, type=MeasuredStep).step_peak_bytes for line in done.stdout.splitlines()]
    more = int(QWEN["num_hidden_layers"]) - 2
    planned = [two + more * (three - two) for two, three in zip(peaks[:2], peaks[2:], strict=True)]
    assert planned == pytest.approx(list(PLANNED.values()), rel=0.005), "write these numbers into PLANNED"


def test_a_step_on_a_gpu_takes_the_memory_that_the_plan_gives(tmp_path: Path, gpu: torch.device, ranks: Ranks) -> None:
    config = write_model(tmp_path, num_layers=QWEN["num_hidden_layers"], num_tokens=MAX_TOKENS)
    with gpu:  # random weights, drawn there for time
        described = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
        causal_lm = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16, trust_remote_code=False)
    causal_lm.save_pretrained(tmp_path)
    del causal_lm
    gc.collect()
    before = torch.cuda.memory_allocated()  # by other tests
    model = load_model(tmp_path, ranks=ranks, settings=ModelSettings.of(config))
    optimizer = make_optimizer(model, config=config.optim)
    schedule = make_schedule(optimizer, config=config.optim, num_steps=1000)
    models = StepModels(policy=model, optimizer=optimizer, schedule=schedule)
    settings = StepSettings(objective=OBJECTIVE, max_lag=config.replay.max_lag, max_grad_norm=1.0)
    for num_tokens, planned in PLANNED.items():
        config.learner.micro_batch_tokens = num_tokens
        packs = [full_pack(config) for _ in range(2)]  # as the plan has
        for _ in range(2):  # the first has no moments yet
            torch.cuda.reset_peak_memory_stats()
            count = sum(len(packed.loss_positions) for packed in packs)
            batch = StepBatch(micro_batches=packs, num_loss_tokens=count, num_trajectories=len(packs[0].lengths))
            assert not train_step(models, batch, settings=settings, ranks=ranks).skipped
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned, rel=0.1)
