"""The section `actors`: one host's actors."""

import re
from dataclasses import dataclass, field
from typing import Literal

from slipstream.common.config.setting_bounds import Count, NonNegative, PositiveShare, Whole, check_bounds
from slipstream.common.process.config_error import require

WHOLE_GPU = 0.9  # the share of a GPU that an engine takes if it has it alone


@dataclass(kw_only=True, slots=True)
class ActorsConfig:
    count: Whole = 1  # actor processes that `slipstream up` and `slipstream actors` start
    max_episodes: Count = 64  # concurrent episodes in one actor
    kv_cache_bytes: Whole = 0  # of each engine; 0: 64 MiB on a CPU, what the weights leave of its share of a GPU
    gpu_memory_utilization: PositiveShare = WHOLE_GPU  # of a GPU, for all of an engine; no effect with kv_cache_bytes
    tensor_parallel: Count = 1  # GPUs of one engine, over which each layer is split; divides the number of heads
    transport: Literal["broadcast", "pull", "relay"] = "broadcast"  # of weights; relay: pulled once a host
    instance_kind: Literal["reserved", "spot"] = "reserved"  # recorded in every trajectory
    price_per_hour: NonNegative = 0.0  # dollars, of one actor's share of its host; recorded in every trajectory
    devices: list[str] = field(default_factory=list)  # GPUs for engines; empty: CUDA_VISIBLE_DEVICES, or all GPUs
    kv_policy: Literal["keep", "recompute"] = "keep"  # KV of running requests after a refresh
    notices: str = "none"  # who warns that this host is taken away: aws, gcp or azure; CLOUD@http://... asks there
    join_timeout_s: NonNegative = 120.0  # how long an actor waits for its run to appear
    drain_s: NonNegative = 5.0  # after SIGTERM or a notice: how long running episodes may finish; the rest is handed in

    def __post_init__(self) -> None:
        check_bounds(self, "actors.")
        num_engines = len(self.devices) // self.tensor_parallel
        require(
            not self.devices or self.count <= num_engines,
            "actors.count",
            f"<= {num_engines}, the number of actors.devices divided by actors.tensor_parallel",
            self.count,
            "each engine needs GPUs of its own",
        )
        require(
            re.fullmatch(r"none|(aws|gcp|azure)(@http://.+)?", self.notices) is not None,
            "actors.notices",
            "none, aws, gcp or azure",
            self.notices,
            "CLOUD@http://... names the address of a metadata service that is not at the cloud's standard one",
        )

    @property
    def limits_memory(self) -> bool:
        """Whether an engine leaves memory of its GPU to other processes."""
        return self.kv_cache_bytes > 0 or self.gpu_memory_utilization < WHOLE_GPU
