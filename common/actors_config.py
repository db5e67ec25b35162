"""The settings of the actors: of one host of them, of their number, and of where a run is launched."""

import re
from dataclasses import dataclass, field

from common.config_error import require


@dataclass(kw_only=True, slots=True)
class ActorsConfig:
    count: int = 2  # actor processes that `slipstream up` and `slipstream actors` start
    max_episodes: int = 32  # concurrent episodes in one actor
    kv_cache_bytes: int = 64 << 20  # of each engine on a CPU
    tensor_parallel: int = 1  # GPUs of one engine, which share each of its layers; divides the model's heads
    transport: str = "broadcast"  # how weights come: broadcast, pull (spot actors, late joiners), or from weights.disk
    relay: bool = False  # start a relay as well, at weights.host: one copy of weights for the host
    instance_kind: str = "reserved"  # reserved or spot; recorded in every trajectory
    price_per_hour: float = 0.0  # dollars, of one actor's share of its host; recorded in every trajectory
    zone: str = ""  # where the host is, as eu-west-1a, for whoever looks at the fleet
    devices: list[str] = field(default_factory=list)  # GPUs for engines; empty: CUDA_VISIBLE_DEVICES, or all
    kv_policy: str = "keep"  # running requests after a refresh: keep old KV, or recompute it with the new weights
    notices: str = "none"  # who says that this host will be taken away: aws, gcp or azure, whose service is then asked
    notices_url: str = ""  # of the metadata service; empty: where the cloud has it
    join_timeout_s: float = 120.0  # an actor that was started first waits this long for its run to appear
    drain_s: float = 5.0  # on SIGTERM or a notice: finish what is running for this long, then give the rest back

    def __post_init__(self) -> None:
        require(self.count >= 0, "actors.count", ">= 0", self.count, "0 starts none")
        require(self.tensor_parallel >= 1, "actors.tensor_parallel", ">= 1", self.tensor_parallel, "1 is the default")
        num_engines = len(self.devices) // self.tensor_parallel
        require(not self.devices or self.count <= num_engines, "actors.count",
                 f"<= {num_engines}, the number of actors.devices by actors.tensor_parallel", self.count,
                 "one engine fills its GPUs")  # fmt: skip
        require(self.max_episodes >= 1, "actors.max_episodes", ">= 1", self.max_episodes, "try 32")
        require(self.kv_cache_bytes >= 1, "actors.kv_cache_bytes", ">= 1", self.kv_cache_bytes,
                 "64 MiB is the default")  # fmt: skip
        require(self.join_timeout_s >= 0, "actors.join_timeout_s", ">= 0", self.join_timeout_s, "120 is the default")
        require(self.drain_s >= 0, "actors.drain_s", ">= 0", self.drain_s, "0 gives everything back at once")
        require(self.notices in ("none", "aws", "gcp", "azure"), "actors.notices", "none, aws, gcp or azure",
                 self.notices, "none asks nobody; SIGTERM is heard always")  # fmt: skip
        require(not self.notices_url or self.notices_url.startswith("http://"), "actors.notices_url", "http://...",
                 self.notices_url, "leave it empty for the cloud's own")  # fmt: skip
        require(self.transport in ("broadcast", "pull", "disk"), "actors.transport", "broadcast, pull or disk",
                 self.transport, "use pull on spot instances")  # fmt: skip
        require(self.kv_policy in ("keep", "recompute"), "actors.kv_policy", "keep or recompute", self.kv_policy,
                 "keep is cheaper")  # fmt: skip
        require(self.instance_kind in ("reserved", "spot"), "actors.instance_kind", "reserved or spot",
                 self.instance_kind, "it is recorded with each trajectory")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class FleetConfig:
    min_actors: int = 1  # fewer are never advised
    max_actors: int = 64  # nor are more

    def __post_init__(self) -> None:
        require(self.min_actors >= 1, "fleet.min_actors", ">= 1", self.min_actors, "1 is the default")
        require(self.max_actors >= self.min_actors, "fleet.max_actors", f">= fleet.min_actors = {self.min_actors}",
                 self.max_actors, "64 is the default")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    actor_hosts: int = 2  # hosts, pods or tasks, each of which runs `slipstream actors`
    actor_gpus: int = 0  # of each of them
    learner_gpus: int = 0  # of the learner's host
    gpu: str = ""  # kind of GPU, as H100; empty: whichever there is
    cpus: int = 4  # of each host at least
    memory_gib: int = 16  # likewise
    use_spot: bool = True  # SkyPilot takes spot instances for actors
    infra: str = ""  # where SkyPilot looks, as aws/eu-west-1; empty: everywhere
    image: str = ""  # container image with Slipstream in it; Kubernetes needs one
    volume: str = ""  # claim of the Kubernetes volume that all pods share, where run.root and the model lie
    sbatch: list[str] = field(default_factory=list)  # further options of Slurm's sbatch, as '--partition=gpu'
    setup: str = ""  # shell commands that come first, by Slurm and SkyPilot, as `. /shared/.venv/bin/activate`

    def __post_init__(self) -> None:
        for name in ("actor_hosts", "cpus", "memory_gib"):
            value = getattr(self, name)
            require(value >= 1, f"launch.{name}", ">= 1", value, "leave it out for the default")
        for name in ("actor_gpus", "learner_gpus"):
            value = getattr(self, name)
            require(value >= 0, f"launch.{name}", ">= 0", value, "0 is a host without GPUs")
        require(all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in self.sbatch), "launch.sbatch",
                 "options like --partition=gpu", self.sbatch, "one in each item")  # fmt: skip
