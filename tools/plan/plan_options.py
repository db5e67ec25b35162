"""The options of `slipstream plan`."""

from dataclasses import dataclass

from slipstream.common.config.config import Config
from slipstream.common.config.setting_bounds import Count, NonNegative, Positive, Whole, check_bounds
from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A kind of GPU, by its data sheet."""

    memory_gib: float
    tflops: float  # peak in dense bfloat16
    gbyte_per_s: float  # of its memory


GPUS = {
    "A100-40": Gpu(memory_gib=40, tflops=312, gbyte_per_s=1555),
    "A100": Gpu(memory_gib=80, tflops=312, gbyte_per_s=2039),
    "H100": Gpu(memory_gib=80, tflops=989, gbyte_per_s=3350),
    "H200": Gpu(memory_gib=141, tflops=989, gbyte_per_s=4800),
    "B200": Gpu(memory_gib=180, tflops=2250, gbyte_per_s=8000),
    "L40S": Gpu(memory_gib=48, tflops=362, gbyte_per_s=864),
    "A10": Gpu(memory_gib=24, tflops=125, gbyte_per_s=600),
    "L4": Gpu(memory_gib=24, tflops=121, gbyte_per_s=300),
    "RTX4090": Gpu(memory_gib=24, tflops=165, gbyte_per_s=1008),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpus: Count = 8  # of the learner's host
    gpu: str = "H100"  # their kind: A100-40, A100, H100, H200, B200, L40S, A10, L4 or RTX4090
    actor_gpus: Whole = 0  # of each host of actors; 0: the actors are on the learner's host
    actor_hosts: Count = 1  # hosts with actors.count actors each; for speed and cost
    link_gbit_per_s: Positive = 25.0  # of the learner's host, to hosts of actors
    episode_tokens: Whole = 0  # assumed length of an episode, prompts included; 0: half of model.max_tokens
    env_seconds: NonNegative = 5.0  # assumed time of the environment in an episode
    gpu_price: NonNegative = 0.0  # dollars an hour of one GPU; 0 if unknown

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        require(self.gpu in GPUS, "--gpu", f"one of {', '.join(GPUS)}", self.gpu, "the nearest one gives an estimate")
        require(
            self.actor_hosts == 1 or self.actor_gpus > 0,
            "--actor-hosts",
            "1 without --actor-gpus, as the actors are on the learner's host",
            self.actor_hosts,
            "give --actor-gpus too",
        )

    def tokens_of(self, config: Config) -> float:
        """The assumed tokens of an episode, at most model.max_tokens."""
        longest = config.model.max_tokens
        return min(self.episode_tokens, longest) if self.episode_tokens else max(longest / 2, 1)
