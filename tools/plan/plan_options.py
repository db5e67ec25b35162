"""The options of `slipstream plan`."""

import math
from dataclasses import dataclass

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpus: int = 8  # of the learner's host
    gpu_gib: float = 80.0  # memory of each GPU
    actor_gpus: int = 0  # of each host of actors; 0: the actors are on the learner's host
    actor_hosts: int = 1  # hosts with actors.count actors each; for speed and cost
    host_gib: float = 0.0  # memory of the learner's host; 0: only print what is needed
    gpu_tflops: float = 989.0  # peak of a GPU in dense bfloat16; an H100's
    gpu_gbyte_per_s: float = 3350.0  # memory bandwidth of a GPU; an H100's
    learner_efficiency: float = 0.35  # assumed share of that peak that the learner reaches
    engine_efficiency: float = 0.5  # assumed share of peak and bandwidth that an engine reaches
    link_gbit_per_s: float = 25.0  # of the learner's host, to hosts of actors
    host_gbyte_per_s: float = 10.0  # from a GPU to its host's memory, and back
    episode_tokens: int = 0  # assumed length of an episode, prompts included; 0: half of model.max_tokens
    sampled_share: float = 0.3  # assumed share of these tokens that the policy samples
    env_seconds: float = 5.0  # assumed time of the environment in an episode
    useful_share: float = 1.0  # assumed share of finished groups that are trained
    gpu_price: float = 0.0  # dollars an hour of one GPU; 0 if unknown

    def __post_init__(self) -> None:
        require(self.gpus >= 1, "--gpus", ">= 1", self.gpus, "a run without GPUs needs no plan")
        require(self.gpu_gib > 0, "--gpu-gib", "> 0", self.gpu_gib, "80 is that of an H100")
        require(self.actor_gpus >= 0, "--actor-gpus", ">= 0", self.actor_gpus, "0: they share the learner's host")
        require(self.actor_hosts >= 1, "--actor-hosts", ">= 1", self.actor_hosts, "1 is the default")
        require(
            self.actor_hosts == 1 or self.actor_gpus > 0,
            "--actor-hosts",
            "1 without --actor-gpus, as the actors are on the learner's host",
            self.actor_hosts,
            "give --actor-gpus too",
        )
        require(self.host_gib >= 0, "--host-gib", ">= 0", self.host_gib, "0 checks no limit")
        for name in ("gpu_tflops", "gpu_gbyte_per_s", "link_gbit_per_s", "host_gbyte_per_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"--{name.replace('_', '-')}", "> 0", value, "leave it out for the default")
        for name in ("learner_efficiency", "engine_efficiency", "sampled_share", "useful_share"):
            value = getattr(self, name)
            require(0 < value <= 1, f"--{name.replace('_', '-')}", "in (0, 1]", value, "it is a share")
        for name in ("episode_tokens", "env_seconds", "gpu_price"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--{name.replace('_', '-')}", ">= 0", value, "leave it out for the default")

    def tokens_of(self, config: Config) -> float:
        """The assumed tokens of an episode, at most model.max_tokens."""
        longest = config.model.max_tokens
        return min(self.episode_tokens, longest) if self.episode_tokens else max(longest / 2, 1)
