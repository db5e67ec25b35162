"""The settings and the machine that the result of a step depends on, besides its weights and its batch."""

import dataclasses

import torch
import transformers

from slipstream.common.config.config import Config
from slipstream.common.config.learner_config import OptimConfig, WarmStartConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.imported import digest_of
from slipstream.learner.ranks.ranks import Ranks

THREADS = "threads of a rank"


def conditions_of(config: Config, *, ranks: Ranks) -> dict[str, str]:
    """Settings and machine, as recorded with each archived step."""
    on_gpu = ranks.device.type == "cuda"
    settings = settings_of(config)
    settings |= {f"file of objective.{key}": digest_of(name) for key, name in config.objective.own_parts.items()}
    return settings | {
        "learner.ranks": str(ranks.num_ranks),
        THREADS: str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def settings_of(config: Config) -> dict[str, str]:
    """The settings that change what is learned from given batches, including the warm start but not the model."""
    learner = config.learner
    settings: dict[str, object] = {
        "model.dtype": config.model.dtype,
        "model.lora": dataclasses.astuple(config.model.lora) if config.model.lora.rank else "off",
        "sampling.temperature": config.sampling.temperature,
        "sampling.top_p": config.sampling.top_p,
        "sampling.top_k": config.sampling.top_k,
        "learner.steps": learner.steps,  # the end of the learning rate schedule
        "learner.ranks": learner.ranks,
        "learner.context_ranks": learner.context_ranks,
        "learner.micro_batch_tokens": learner.micro_batch_tokens,
        "learner.activation_checkpointing": learner.activation_checkpointing,
        "learner.compile": learner.compile,
    }
    settings |= _section("objective", config.objective) | _section("optim", config.optim)
    if config.warm_start.episodes:
        settings |= _section("warm_start", config.warm_start) | {"run.seed": config.run.seed}
    return {name: str(value) for name, value in settings.items()}


def differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """One line of text for each setting that differs."""
    return [
        f"{name} was {theirs.get(name, 'unknown')} and is {ours.get(name, 'unknown')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _section(name: str, section: ObjectiveConfig | OptimConfig | WarmStartConfig) -> dict[str, object]:
    return {f"{name}.{key}": value for key, value in dataclasses.asdict(section).items()}
