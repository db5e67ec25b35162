"""The options of `slipstream plan`."""

from dataclasses import dataclass

from common.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpus: int = 8  # of the learner's host
    gpu_gib: float = 80.0  # memory of each GPU
    actor_gpus: int = 0  # of each host of actors; 0: the actors are on the learner's host
    host_gib: float = 0.0  # memory of the learner's host; 0: only print what is needed

    def __post_init__(self) -> None:
        require(self.gpus >= 1, "--gpus", ">= 1", self.gpus, "a run without GPUs needs no plan")
        require(self.gpu_gib > 0, "--gpu-gib", "> 0", self.gpu_gib, "80 is that of an H100")
        require(self.actor_gpus >= 0, "--actor-gpus", ">= 0", self.actor_gpus, "0: they share the learner's host")
        require(self.host_gib >= 0, "--host-gib", ">= 0", self.host_gib, "0 checks no limit")
