"""The learner: its optimizer, warm start and evaluations, and how it publishes weights."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from slipstream.common.config.setting_bounds import Count, NonNegative, Positive, ShareBelow1, Whole, check_bounds
from slipstream.common.process.config_error import require


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: Positive = 1e-6  # peak learning rate of AdamW
    critic_lr: Positive = 1e-5  # the critic's peak learning rate; its other settings are the policy's
    weight_decay: NonNegative = 0.0  # decoupled; of all weights but norms and biases
    warmup_steps: Whole = 0  # steps in which the learning rate rises linearly from 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up; to 0 at the last step
    max_grad_norm: float = 1.0  # global norm; larger gradients are scaled down to it

    def __post_init__(self) -> None:
        check_bounds(self, "optim.")
        require(self.max_grad_norm > 0, "optim.max_grad_norm", "> 0", self.max_grad_norm, "inf never clips")


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    steps: Count = 100  # optimizer steps of reinforcement learning
    ranks: Count = 1  # FSDP processes, each on a GPU of its own if there are GPUs
    devices: list[str] = field(default_factory=list)  # their GPUs on this host; empty: the first ones, docs/install.md
    hosts: Count = 1  # hosts that the ranks are divided over; all of them must see the same `run.root`
    host_rank: int = 0  # which of them this one is; host 0 has rank 0, the publisher and the run's records
    rendezvous: str = ""  # with several hosts: ADDRESS:PORT of host 0, where the ranks find each other
    context_ranks: Count = 1  # ranks that compute each micro-batch together, for sequences that do not fit one of them
    micro_batch_tokens: Count = 2048  # the most packed tokens in one forward pass; docs/learner.md on shared prefixes
    publish_every: Count = 1  # optimizer steps between publishes
    checkpoint_every: Count = 20  # optimizer steps between checkpoints
    keep_checkpoints: Count = 2  # the newest checkpoints that are kept
    claim_timeout_s: Positive = 600.0  # the run ends with an error if no batch is ready for this long
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # torch.compile each layer at the start; on a CPU this needs a C++ compiler
    cpu_offload: bool = False  # weights, gradients and optimizer state in host memory; for models that do not fit a GPU

    def __post_init__(self) -> None:
        check_bounds(self, "learner.")
        hosts = self.hosts
        require(
            self.ranks % hosts == 0, "learner.ranks", f"a multiple of learner.hosts = {hosts}", self.ranks, "raise it"
        )
        require(
            self.ranks % self.context_ranks == 0,
            "learner.context_ranks",
            f"a divisor of learner.ranks = {self.ranks}",
            self.context_ranks,
            "1 lets each rank compute micro-batches of its own",
        )
        require(
            0 <= self.host_rank < hosts, "learner.host_rank", f"in [0, {hosts - 1}]", self.host_rank, "count from 0"
        )
        require(
            not self.rendezvous or (hosts > 1 and _is_address(self.rendezvous)),
            "learner.rendezvous",
            "ADDRESS:PORT of host 0 with several learner.hosts, else empty",
            self.rendezvous,
            "use an address that the other hosts can connect to, and a free port, such as 10.0.0.1:29500",
        )
        require(
            not self.devices or self.ranks_per_host <= len(self.devices),
            "learner.ranks",
            f"<= {len(self.devices) * hosts}, the number of learner.devices on all hosts",
            self.ranks,
            "each rank needs a GPU of its own",
        )

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    episodes: Whole = 0  # expert episodes to imitate once before RL; 0 skips the warm start
    noise: ShareBelow1 = 0.0  # probability that the expert takes a random admissible action, which is imitated
    batch_tokens: Count = 4096  # packed tokens in one optimizer step
    lr: Positive = 1e-3  # AdamW learning rate

    def __post_init__(self) -> None:
        check_bounds(self, "warm_start.")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    num_tasks: Annotated[int | None, Ge(0)] = None  # held-out tasks, sampled and greedy; 0: none; None: 32 if any
    every: Whole = 50  # optimizer steps between evaluations during training; 0: only at the start and the end

    def __post_init__(self) -> None:
        check_bounds(self, "eval.")


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    host: str = "127.0.0.1"  # address that the publisher or a relay binds to; auto: the one that reaches redis.url
    key_file: str = ""  # file that `slipstream access key` wrote, the same on every host; empty: no authentication
