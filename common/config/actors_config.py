"""The section `actors`: one host's actors."""

from dataclasses import dataclass, field

from slipstream.common.process.config_error import require

WHOLE_GPU = 0.9  # the share of a GPU that an engine takes if it has it alone


@dataclass(kw_only=True, slots=True)
class ActorsConfig:
    count: int = 1  # actor processes that `slipstream up` and `slipstream actors` start
    max_episodes: int = 64  # concurrent episodes in one actor
    kv_cache_bytes: int = 0  # of each engine; 0: 64 MiB on a CPU, what the weights leave of its share of a GPU
    gpu_memory_utilization: float = WHOLE_GPU  # of a GPU, for all of an engine; without effect with kv_cache_bytes
    tensor_parallel: int = 1  # GPUs of one engine, over which each layer is split; divides the number of heads
    transport: str = "broadcast"  # how actors receive weights: broadcast, pull (for spot actors), or disk
    relay: bool = False  # also start a relay at weights.host, which fetches weights once for the whole host
    instance_kind: str = "reserved"  # reserved or spot; recorded in every trajectory
    price_per_hour: float = 0.0  # dollars, of one actor's share of its host; recorded in every trajectory
    zone: str = ""  # where the host is, such as eu-west-1a; shown with the fleet
    devices: list[str] = field(default_factory=list)  # GPUs for engines; empty: CUDA_VISIBLE_DEVICES, or all GPUs
    kv_policy: str = "keep"  # KV of running requests after a refresh: keep it, or recompute it with the new weights
    notices: str = "none"  # cloud whose metadata service announces that this host will be taken away: aws, gcp, azure
    notices_url: str = ""  # URL of that metadata service; empty: the cloud's standard URL
    join_timeout_s: float = 120.0  # how long an actor waits for its run to appear
    drain_s: float = 5.0  # after SIGTERM or a notice: how long running episodes may finish; the rest is handed in

    def __post_init__(self) -> None:
        require(self.count >= 0, "actors.count", ">= 0", self.count, "0 starts none")
        require(self.tensor_parallel >= 1, "actors.tensor_parallel", ">= 1", self.tensor_parallel, "1 is the default")
        num_engines = len(self.devices) // self.tensor_parallel
        require(
            not self.devices or self.count <= num_engines,
            "actors.count",
            f"<= {num_engines}, the number of actors.devices divided by actors.tensor_parallel",
            self.count,
            "each engine needs GPUs of its own",
        )
        require(self.max_episodes >= 1, "actors.max_episodes", ">= 1", self.max_episodes, "try 64")
        require(
            self.kv_cache_bytes >= 0, "actors.kv_cache_bytes", ">= 0", self.kv_cache_bytes, "0 chooses by the device"
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            "actors.gpu_memory_utilization",
            "in (0, 1]",
            self.gpu_memory_utilization,
            "0.9 is usual for a GPU that nothing else uses",
        )
        require(self.join_timeout_s >= 0, "actors.join_timeout_s", ">= 0", self.join_timeout_s, "120 is the default")
        require(self.drain_s >= 0, "actors.drain_s", ">= 0", self.drain_s, "0 hands everything in at once")
        require(
            self.notices in ("none", "aws", "gcp", "azure"),
            "actors.notices",
            "none, aws, gcp or azure",
            self.notices,
            "none asks no cloud; SIGTERM always works",
        )
        require(
            not self.notices_url or self.notices_url.startswith("http://"),
            "actors.notices_url",
            "http://...",
            self.notices_url,
            "leave it empty for the cloud's standard URL",
        )
        require(
            self.transport in ("broadcast", "pull", "disk"),
            "actors.transport",
            "broadcast, pull or disk",
            self.transport,
            "use pull on spot instances",
        )
        require(
            self.kv_policy in ("keep", "recompute"),
            "actors.kv_policy",
            "keep or recompute",
            self.kv_policy,
            "keep is cheaper",
        )
        require(
            self.instance_kind in ("reserved", "spot"),
            "actors.instance_kind",
            "reserved or spot",
            self.instance_kind,
            "it is recorded with each trajectory",
        )

    @property
    def limits_memory(self) -> bool:
        """Whether an engine leaves memory of its GPU to other processes."""
        return self.kv_cache_bytes > 0 or self.gpu_memory_utilization < WHOLE_GPU
