"""The settings and the machine that the result of a step depends on, besides its weights and its batch."""

import dataclasses

import torch
import transformers

from slipstream.common.config.config import Config, key_paths, value_of
from slipstream.common.process.imported import digest_of
from slipstream.learner.ranks.ranks import Ranks

THREADS = "threads of a rank"
OF_LEARNING = (
    "model.dtype",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "learner.steps",  # the end of the learning rate schedule
    "learner.ranks",
    "learner.context_ranks",
    "learner.micro_batch_tokens",
    "learner.activation_checkpointing",
    "learner.compile",
)


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
    sections = ("objective.", "optim.", *(("warm_start.", "run.seed") if config.warm_start.episodes else ()))
    lora = dataclasses.astuple(config.model.lora) if config.model.lora.rank else "off"
    return {"model.lora": str(lora)} | {
        path: str(value_of(config, path)) for path in key_paths() if path in OF_LEARNING or path.startswith(sections)
    }


def differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """One line of text for each setting that differs."""
    return [
        f"{name} was {theirs.get(name, 'unknown')} and is {ours.get(name, 'unknown')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
