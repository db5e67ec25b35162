"""The GPUs of this host, and which of them the learner and the actors get under `slipstream up`."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The GPUs of each side; none on a CPU."""

    learner: list[str]
    actors: list[str]

    @property
    def shared(self) -> list[str]:
        return [device for device in self.learner if device in self.actors]

    def __str__(self) -> str:
        if not self.learner:
            return "none" if not self.actors else f"actors {', '.join(self.actors)}"
        return f"learner {', '.join(self.learner)}; actors {', '.join(self.actors)}"


def visible_devices() -> list[str]:
    """The GPUs that this process may use: CUDA_VISIBLE_DEVICES if it is set, else all; none on a CPU."""
    visible = os.environ.get(VARIABLE)
    if visible is not None:  # CUDA does not see those after a -1 either
        named = itertools.takewhile(lambda device: device != "-1", map(str.strip, visible.split(",")))
        return [device for device in named if device]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        return _nvidia_smi("--query-gpu=index", "--format=csv,noheader").split()
    except ValueError as error:
        raise ConfigError(
            f"nvidia-smi failed to list the GPUs ({error}); repair it, or name the GPUs in `actors.devices` or in "
            "CUDA_VISIBLE_DEVICES (empty for none)"
        ) from error


def split_devices(config: Config, visible: Sequence[str]) -> Split:
    """Split the `visible` GPUs of one host between learner and actors; settings that name GPUs come first.

    By default the learner gets the first `learner.ranks`, or this host's part of them, and the actors the others. If
    there are no others, they share the learner's GPUs. Raises ConfigError if the GPUs are too few.
    """
    learner, actors = list(config.learner.devices), list(config.actors.devices)
    if not visible and not learner:
        return Split(learner=[], actors=actors)
    ranks = config.learner.ranks_per_host
    if not learner:
        free = [device for device in visible if device not in actors]
        learner = (free if len(free) >= ranks else list(visible))[:ranks]
    if not actors:
        actors = [device for device in visible if device not in learner] or list(learner)
    split = Split(learner=learner, actors=actors)
    _check(split, config)
    return split


def _check(split: Split, config: Config) -> None:
    ranks, actors = config.learner.ranks_per_host, config.actors
    if len(split.learner) < ranks:
        raise ConfigError(
            f"`learner.ranks` must be <= {len(split.learner)}, the GPUs for the learner ({', '.join(split.learner)}), "
            f"got {ranks}; lower it, or set `learner.devices`"
        )
    together = actors.tensor_parallel
    if actors.count * together > len(split.actors):
        raise ConfigError(
            f"`actors.count` must be <= {len(split.actors) // together} for the GPUs of the actors "
            f"({', '.join(split.actors)}), got {actors.count}, each with actors.tensor_parallel={together}; lower it, "
            "or set `actors.devices`"
        )


def memory_of(device: str) -> int:
    """The bytes of the GPU `device`. Raises ConfigError if nvidia-smi does not say."""
    try:
        return int(_nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={device}")) << 20
    except ValueError as error:
        raise ConfigError(
            f"nvidia-smi does not say how much memory GPU {device} has ({error}); set `actors.kv_cache_bytes`"
        ) from error


def _nvidia_smi(*query: str) -> str:
    """What nvidia-smi answers. Raises ValueError with the reason, also if it hangs, as it may with a broken GPU."""
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(str(error)) from error
    if done.returncode:
        raise ValueError((done.stdout + done.stderr).strip())
    return done.stdout
