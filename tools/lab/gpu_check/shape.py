"""Steps of a model of 1.5 billion weights: peak memory against `slipstream plan`, tokens a second, and MFU."""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.common.config.config import Config, load_config
from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.flops import flops_of
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, load_model
from slipstream.learner.ranks.ranks import Ranks, leave_ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.small import OBJECTIVE, one_rank
from slipstream.tools.plan.full_pack import full_pack

# The config.json of Qwen2.5-1.5B, as published.
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
REDUCED = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 32}
# Peak of a step by `slipstream plan`, in bytes, by the tokens of a micro-batch. The plan needs PyTorch's build for
# CPUs, so a test compares these numbers with it.
PLANNED = {8192: 31_732_979_490, 32_768: 37_085_962_628}
MAX_TOKENS = 8192
MAX_DIFFERENCE = 0.1
NUM_MICRO_BATCHES = 2  # as the plan has
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The model, what trains it, and its configuration."""

    config: Config
    ranks: Ranks
    models: StepModels


def check(findings: Findings, device: str) -> None:
    """Load the model as the learner does, then train on full micro-batches of each size."""
    reduced, ranks = device == "cpu", one_rank(device)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(QWEN | REDUCED if reduced else QWEN))
        _save(folder, torch.device(device))
        started = time.perf_counter()
        loaded = _load(config_of(folder, num_tokens=128 if reduced else MAX_TOKENS), ranks)
        findings.note("loading", time.perf_counter() - started, "s")
    parameters = sum(each.numel() for each in loaded.models.policy.causal_lm.parameters())
    findings.note("parameters", parameters / 1e9, "billion")
    for num_tokens in (128, 256) if reduced else PLANNED:
        _measure(findings, loaded, num_tokens)
    if not reduced:
        free, total = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        findings.note("memory of the GPU taken beside tensors, at the end", (total - free - allocated) / 2**30, "GiB")
    leave_ranks()


def config_of(folder: Path, *, num_tokens: int) -> Config:
    """The configuration that is planned and run."""
    return load_config(
        None,
        [
            f"model.path={folder}",
            "model.dtype=bfloat16",
            f"model.max_tokens={min(num_tokens, MAX_TOKENS)}",
            f"learner.micro_batch_tokens={num_tokens}",
            "learner.activation_checkpointing=true",
        ],
    )


def _save(folder: Path, device: torch.device) -> None:
    """Write random weights into the folder of a config.json; on a GPU they are drawn there, for time."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(0)
    with device:
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    causal_lm.save_pretrained(folder)


def _load(config: Config, ranks: Ranks) -> Loaded:
    model = load_model(config.model.path, ranks=ranks, settings=ModelSettings.of(config))
    optimizer = make_optimizer(model, config=config.optim)
    schedule = make_schedule(optimizer, config=config.optim, num_steps=1000)
    return Loaded(config=config, ranks=ranks, models=StepModels(policy=model, optimizer=optimizer, schedule=schedule))


def _measure(findings: Findings, loaded: Loaded, num_tokens: int) -> None:
    config, on_gpu = loaded.config, loaded.ranks.device.type == "cuda"
    config.learner.micro_batch_tokens = num_tokens
    packs = [full_pack(config) for _ in range(NUM_MICRO_BATCHES)]
    updates = [_updates(loaded, packs)]  # the first has no moments yet, and the allocator grows
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(loaded.ranks.device)
    started = time.perf_counter()
    updates += [_updates(loaded, packs, clock) for _ in range(REPEATS)]
    seconds, parts = (time.perf_counter() - started) / REPEATS, clock.take()
    lengths = [length for packed in packs for length in packed.lengths]
    what = f"{num_tokens} tokens a micro-batch"
    findings.require(f"{what}: every step updates the weights", all(updates))
    findings.note(f"{what}: tokens a second", sum(lengths) / seconds)
    for part, part_s in parts.items():
        findings.note(f"{what}: {part}", 1e3 * part_s / REPEATS, "ms")
    num_pairs = sum(packed.num_pairs for packed in packs)
    flops = flops_of(loaded.models.policy, device=loaded.ranks.device, num_ranks=1)
    findings.note(f"{what}: model FLOPs", flops.of(sum(lengths), num_pairs=num_pairs) / seconds / 1e12, "TFLOP/s")
    if (utilisation := flops.utilisation(sum(lengths), num_pairs=num_pairs, elapsed_s=seconds)) is not None:
        findings.note(f"{what}: MFU, without recomputation", 100 * utilisation, "%")
    if on_gpu:
        peak, planned = torch.cuda.max_memory_allocated(), PLANNED[num_tokens]
        findings.note(f"{what}: peak", peak / 1e9, "GB")
        findings.note(f"{what}: planned", planned / 1e9, "GB")
        findings.at_most(f"{what}: peak against the plan, off by", abs(peak / planned - 1), MAX_DIFFERENCE)
        findings.note(f"{what}: reserved by the allocator", torch.cuda.max_memory_reserved() / 1e9, "GB")


def _updates(loaded: Loaded, packs: list[Packed], clock: Clock | None = None) -> bool:
    """Make one step; return whether it was not skipped."""
    metrics = train_step(
        loaded.models,
        StepBatch(
            micro_batches=packs,
            num_loss_tokens=sum(len(packed.loss_positions) for packed in packs),
            num_trajectories=len(packs[0].lengths),
        ),
        settings=StepSettings(objective=OBJECTIVE, max_lag=loaded.config.replay.max_lag, max_grad_norm=1.0),
        ranks=loaded.ranks,
        clock=clock,
    )
    return not metrics.skipped
