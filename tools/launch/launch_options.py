"""The options of `slipstream launch`, except those of one call: the hosts of a run."""

import re
from dataclasses import dataclass

from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    actor_hosts: int = 2  # hosts, pods or tasks; each one runs `slipstream actors`
    actor_gpus: int = 0  # GPUs of each actor host
    learner_gpus: int = 0  # GPUs of each of the learner's hosts, one for each of its ranks there
    gpu: str = ""  # kind of GPU, such as H100; empty: any; SkyPilot needs it
    cpus: int = 4  # CPUs of each host, at least
    memory_gib: int = 16  # memory of each host, at least
    on_demand: bool = False  # SkyPilot takes on-demand instances for actors; spot instances otherwise
    infra: str = ""  # where SkyPilot searches for hosts, such as aws/eu-west-1; empty: everywhere
    image: str = ""  # container image that contains Slipstream; Kubernetes needs it
    volume: str = ""  # the learner's, mounted at run.root: a claim on Kubernetes, on SkyPilot a bucket as s3://NAME
    sbatch: str = ""  # more options of Slurm's sbatch, such as '--partition=gpu --qos=high'
    setup: str = ""  # shell commands that Slurm and SkyPilot run first, such as `. /shared/.venv/bin/activate`

    def __post_init__(self) -> None:
        for name in ("actor_hosts", "cpus", "memory_gib"):
            value = getattr(self, name)
            require(value >= 1, f"--{name.replace('_', '-')}", ">= 1", value, "leave it out for the default")
        for name in ("actor_gpus", "learner_gpus"):
            value = getattr(self, name)
            require(value >= 0, f"--{name.replace('_', '-')}", ">= 0", value, "0 is a host without GPUs")
        require(
            all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in self.sbatch.split()),
            "--sbatch",
            "options like --partition=gpu",
            self.sbatch,
            "separate them by spaces",
        )
