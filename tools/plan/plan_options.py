"""The options of `slipstream plan`."""

from dataclasses import dataclass

from slipstream.common.config.config import Config
from slipstream.common.config.setting_bounds import Count, NonNegative, Positive, PositiveShare, Whole, check_bounds
from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpus: Count = 8  # of the learner's host
    gpu_gib: Positive = 80.0  # memory of each GPU
    actor_gpus: Whole = 0  # of each host of actors; 0: the actors are on the learner's host
    actor_hosts: Count = 1  # hosts with actors.count actors each; for speed and cost
    host_gib: NonNegative = 0.0  # memory of the learner's host; 0: only print what is needed
    gpu_tflops: Positive = 989.0  # peak of a GPU in dense bfloat16; an H100's
    gpu_gbyte_per_s: Positive = 3350.0  # memory bandwidth of a GPU; an H100's
    learner_efficiency: PositiveShare = 0.35  # assumed share of that peak that the learner reaches
    engine_efficiency: PositiveShare = 0.5  # assumed share of peak and bandwidth that an engine reaches
    link_gbit_per_s: Positive = 25.0  # of the learner's host, to hosts of actors
    host_gbyte_per_s: Positive = 10.0  # from a GPU to its host's memory, and back
    episode_tokens: Whole = 0  # assumed length of an episode, prompts included; 0: half of model.max_tokens
    sampled_share: PositiveShare = 0.3  # assumed share of these tokens that the policy samples
    env_seconds: NonNegative = 5.0  # assumed time of the environment in an episode
    useful_share: PositiveShare = 1.0  # assumed share of finished groups that are trained
    gpu_price: NonNegative = 0.0  # dollars an hour of one GPU; 0 if unknown

    def __post_init__(self) -> None:
        check_bounds(self, "--")
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
