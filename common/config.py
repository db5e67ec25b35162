"""The configuration: dataclasses, one YAML file of differences, and `a.b=c` overrides.

OmegaConf lives in `load_config` only; everything else sees plain dataclasses, and a component gets its own section.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from tools.collect_options import CollectConfig
from common.config_error import ConfigError, require
from common.env_config import EnvConfig
from common.env_server_config import EnvServerConfig
from common.fit_config import FitConfig
from common.actors_config import ActorsConfig, FleetConfig, LaunchConfig
from common.kept_sets import MAX_TOP_K
from common.objective_config import ObjectiveConfig

MAX_CHUNK_BYTES = 64 << 20  # what a publisher holds in memory for one request


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"  # the directory under `root`, and the prefix of every Redis key
    root: str = "runs"  # where run directories live
    seed: int = 0  # of the model, the order of tasks, and the sampling of every member
    rerun_of: str = ""  # the run under `root` whose archive the learner trains on; empty trains on what actors make

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name) is not None,
            "run.name", "1 to 64 letters, digits, '.', '_' or '-'", self.name, "choose another name",
        )  # fmt: skip
        require(self.rerun_of != self.name, "run.rerun_of", "another run than run.name", self.rerun_of,
                 "choose another run.name")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    hidden_size: int = 96  # width of the residual stream
    intermediate_size: int = 256  # width of the MLP
    num_layers: int = 3  # decoder layers
    num_heads: int = 3  # attention heads, each of head_dim
    num_kv_heads: int = 3  # key-value heads; divides num_heads
    head_dim: int = 32  # vLLM's CPU build takes 32, 64 or 128
    num_tasks: int = 400  # train tasks whose text makes the vocabulary

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "num_tasks"):
            value = getattr(self, name)
            require(value >= 1, f"model.tiny.{name}", ">= 1", value, "leave it out for the default")
        require(self.head_dim in (32, 64, 128), "model.tiny.head_dim", "32, 64 or 128", self.head_dim,
                 "vLLM's CPU attention has no other")  # fmt: skip
        require(self.num_heads % self.num_kv_heads == 0, "model.tiny.num_kv_heads", "a divisor of num_heads",
                 self.num_kv_heads, f"num_heads is {self.num_heads}")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: int = 0  # of the adapters, which are then all that trains; 0 is off and trains every weight
    alpha: int = 32  # an adapter counts alpha / rank times
    target_modules: list[str] = field(default_factory=list)  # ends of layers' names; empty: all linear but the head

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", ">= 0", self.rank, "16 is usual, 0 trains every weight")
        require(self.alpha >= 1, "model.lora.alpha", ">= 1", self.alpha, "32 is usual")
        require(all(self.target_modules), "model.lora.target_modules", "names like q_proj", self.target_modules,
                 "leave it empty for every linear layer but the head")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # a Hugging Face folder; empty makes the tiny model below
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dtype: str = "float32"  # of the forward pass: float32 or bfloat16; master weights are always float32
    max_tokens: int = 512  # context: an episode never grows past it

    def __post_init__(self) -> None:
        require(self.dtype in ("float32", "bfloat16"), "model.dtype", "float32 or bfloat16", self.dtype,
                 "use float32 on a CPU")  # fmt: skip
        require(self.max_tokens >= 16, "model.max_tokens", ">= 16", self.max_tokens, "an episode must fit in it")


@dataclass(kw_only=True, slots=True)
class RedisConfig:
    url: str = ""  # redis://host:port and other forms, see docs/running.md; empty: `slipstream up` starts a server
    shards: list[str] = field(default_factory=list)  # further servers for groups, without passwords; '' is `url` again

    def __post_init__(self) -> None:
        require(not any("@" in shard for shard in self.shards), "redis.shards", "URLs without user and password",
                 f"{len(self.shards)} of them", "they are reached with those of redis.url")  # fmt: skip

    @property
    def num_shards(self) -> int:
        """Servers, or hash slots, that groups are shared out over."""
        return 1 + len(self.shards)


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    temperature: float = 1.0  # of training episodes
    top_p: float = 1.0  # chooses among the likeliest tokens that have this probability together; 1 is off
    top_k: int = 0  # chooses among this many likeliest tokens, which are recorded with every token; 0 is off
    max_turn_tokens: int = 32  # a generation is cut here

    def __post_init__(self) -> None:
        require(self.temperature > 0, "sampling.temperature", "> 0", self.temperature,
                 "training episodes are sampled; evaluation does its greedy pass by itself")  # fmt: skip
        require(self.max_turn_tokens >= 1, "sampling.max_turn_tokens", ">= 1", self.max_turn_tokens, "try 32")
        require(0 < self.top_p <= 1, "sampling.top_p", "in (0, 1]", self.top_p, "1 is off")
        require(self.top_k == 0 or 2 <= self.top_k <= MAX_TOP_K, "sampling.top_k", f"0, or in [2, {MAX_TOP_K}]",
                 self.top_k, "the learner's softmax runs over what it keeps, and 1 keeps nothing to learn")  # fmt: skip
        require(self.top_p == 1 or self.top_k > 0, "sampling.top_k", "> 0 where sampling.top_p is below 1", self.top_k,
                 "the kept set of every token is recorded, and only top-k bounds it")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    group_size: int = 8  # sibling attempts at one task
    groups_per_step: int = 8  # groups that one optimizer step consumes
    target_lag: int = 2  # optimizer steps of work admitted ahead; 0 is synchronous
    max_lag: int = 4  # groups with an older token than this are dropped at claim
    order: str = "oldest"  # which ready groups a step takes: oldest, freshest, uniform or prioritised
    max_uses: int = 1  # steps that may learn from one group
    keep_fraction: float = 1.0  # of a step's candidates, groups whose returns differ most; the others are dropped
    samples_per_insert: float = 0.0  # uses of a group on average; 0 leaves it to max_uses alone
    lease_ttl_s: float = 10.0  # an actor silent for this long loses its leases
    max_attempts: int = 4  # attempts at a member before its group is dropped with the reason
    max_trajectory_bytes: int = 8 << 20  # larger ones are refused
    archive: bool = True  # keep in trajectories/ what each step was trained on; without it nothing can be re-run
    compress: bool = False  # trajectories travel and are held in zstd: about a third of the bytes, for CPU on both ends

    def __post_init__(self) -> None:
        require(self.group_size >= 1, "replay.group_size", ">= 1", self.group_size, "8 is the default")
        require(self.groups_per_step >= 1, "replay.groups_per_step", ">= 1", self.groups_per_step, "try 8")
        require(0 < self.keep_fraction <= 1, "replay.keep_fraction", "in (0, 1]", self.keep_fraction,
                 "1 keeps every group")  # fmt: skip
        require(self.keep_fraction == 1 or self.max_uses == 1, "replay.keep_fraction", "1 where replay.max_uses > 1",
                 self.keep_fraction, "a group that was chosen once is not a candidate again")  # fmt: skip
        require(self.target_lag >= 0, "replay.target_lag", ">= 0", self.target_lag, "use 0 for synchronous training")
        require(self.max_lag >= 0, "replay.max_lag", ">= 0", self.max_lag, "use 0 for synchronous training")
        require(self.order in ("oldest", "freshest", "uniform", "prioritised"), "replay.order",
                 "oldest, freshest, uniform or prioritised", self.order, "oldest is the default")  # fmt: skip
        require(self.max_uses >= 1, "replay.max_uses", ">= 1", self.max_uses, "1 trains each group once")
        require(self.order != "prioritised" or self.max_uses > 1, "replay.max_uses", ">= 2 where `replay.order` is "
                 "prioritised", self.max_uses, "a group has its score from its first use")  # fmt: skip
        require(self.samples_per_insert == 0 or 1 <= self.samples_per_insert <= self.max_uses,
                 "replay.samples_per_insert", f"0, or in [1, replay.max_uses = {self.max_uses}]",
                 self.samples_per_insert, "0 leaves it to max_uses alone")  # fmt: skip
        require(1 <= self.lease_ttl_s < math.inf, "replay.lease_ttl_s", ">= 1", self.lease_ttl_s, "try 10")
        require(self.max_attempts >= 1, "replay.max_attempts", ">= 1", self.max_attempts, "1 is no second try")
        require(self.max_trajectory_bytes >= 1, "replay.max_trajectory_bytes", ">= 1", self.max_trajectory_bytes,
                 "8 MiB is the default")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float = 1e-6  # AdamW learning rate at the top of its schedule
    critic_lr: float = 1e-5  # the critic's; all else is as for the policy
    beta1: float = 0.9  # decay of the gradient's mean
    beta2: float = 0.95  # decay of the gradient's square
    eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.0  # decoupled
    warmup_steps: int = 0  # linear from 0
    schedule: str = "constant"  # after the warm-up: constant, linear or cosine, down to 0 at the last step
    max_grad_norm: float = 1.0  # global norm; larger gradients are scaled down

    def __post_init__(self) -> None:
        for name, usual in (("lr", "1e-6"), ("critic_lr", "1e-5")):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"optim.{name}", "> 0", value, f"{usual} is usual for 7B")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}", "in [0, 1)", value, "0.9 and 0.95 are the defaults")
        for name in ("eps", "max_grad_norm"):
            value = getattr(self, name)
            require(value > 0, f"optim.{name}", "> 0", value, "inf never clips" if name == "max_grad_norm" else "1e-8")
        for name in ("weight_decay", "warmup_steps"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name}", ">= 0", value, "0 is off")
        require(self.schedule in ("constant", "linear", "cosine"), "optim.schedule", "constant, linear or cosine",
                 self.schedule, "constant is usual for RL")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100  # optimizer steps of reinforcement learning
    ranks: int = 1  # FSDP processes that `slipstream up` starts
    micro_batch_tokens: int = 2048  # packed tokens in one forward pass, at most
    logprob_chunk_tokens: int = 1024  # tokens whose logits exist at one time
    publish_every: int = 1  # optimizer steps between publishes
    checkpoint_every: int = 20  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # older ones are removed
    claim_timeout_s: float = 600.0  # no ready batch for this long ends the run with an explanation
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # torch.compile each layer, once at the start; needs a C++ compiler on a CPU
    cpu_offload: bool = False  # weights, gradients and optimizer state in host memory; for models that do not fit a GPU
    peak_tflops: float = 0.0  # of one device, for perf/mfu; 0: a GPU's as its name says, none for a CPU

    def __post_init__(self) -> None:
        for name in ("steps", "ranks", "micro_batch_tokens", "logprob_chunk_tokens", "publish_every",
                     "checkpoint_every", "keep_checkpoints"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"learner.{name}", ">= 1", value, "leave it out for the default")
        require(self.peak_tflops >= 0, "learner.peak_tflops", ">= 0", self.peak_tflops, "0 goes by the device's name")


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    episodes: int = 0  # expert episodes to imitate before RL; 0 skips the warm start
    noise: float = 0.0  # chance that the expert does a random admissible action, which is imitated like the others
    epochs: int = 1  # passes over the episodes
    batch_tokens: int = 4096  # packed tokens in one optimizer step
    lr: float = 1e-3  # AdamW learning rate

    def __post_init__(self) -> None:
        require(0 <= self.noise < 1, "warm_start.noise", "in [0, 1)", self.noise, "0.3 leaves room to learn")
        require(self.episodes >= 0, "warm_start.episodes", ">= 0", self.episodes, "0 skips the warm start")
        require(self.epochs >= 1, "warm_start.epochs", ">= 1", self.epochs, "1 is one pass")
        require(self.batch_tokens >= 1, "warm_start.batch_tokens", ">= 1", self.batch_tokens, "try 4096")
        require(math.isfinite(self.lr) and self.lr > 0, "warm_start.lr", "> 0", self.lr, "try 1e-3")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    num_tasks: int = 0  # held-out tasks, each tried once sampled and once greedy; 0 skips evaluation
    every: int = 0  # optimizer steps from one evaluation to the next, while training goes on; 0: at start and end only

    def __post_init__(self) -> None:
        require(self.num_tasks >= 0, "eval.num_tasks", ">= 0", self.num_tasks, "0 skips evaluation")
        require(self.every >= 0, "eval.every", ">= 0", self.every, "0 evaluates at the start and the end only")


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    host: str = "127.0.0.1"  # the publisher, or a relay, binds here; other hosts need an address they can reach
    broadcast_timeout_s: float = 20.0  # a member that takes longer is left out and pulls
    chunk_bytes: int = 4 << 20  # of a pull reply and of a broadcast
    anchor_every: int = 10  # versions from one that newcomers can pull whole to the next; 1: none travels as a delta
    disk: str = ""  # path or fsspec URL where versions are written too, for actors.transport=disk; empty for none
    fan_out: int = 8  # receivers that a publisher, or a relay, lets pull at a time
    pull_bytes_per_s: int = 0  # that a publisher, or a relay, sends each of them at most; 0 is no limit
    key_file: str = ""  # what `slipstream key` wrote, the same on every host; empty: who reaches it may pull

    def __post_init__(self) -> None:
        require(0 < self.chunk_bytes <= MAX_CHUNK_BYTES, "weights.chunk_bytes", f"in [1, {MAX_CHUNK_BYTES}]",
                 self.chunk_bytes, "the publisher refuses to send more at once")  # fmt: skip
        require(self.anchor_every >= 1, "weights.anchor_every", ">= 1", self.anchor_every, "10 is the default")
        require(self.fan_out >= 1, "weights.fan_out", ">= 1", self.fan_out, "8 is the default")
        require(self.pull_bytes_per_s == 0 or self.pull_bytes_per_s >= self.chunk_bytes, "weights.pull_bytes_per_s",
                 f"0, or a chunk a second: weights.chunk_bytes is {self.chunk_bytes}", self.pull_bytes_per_s,
                 "make the chunks smaller")  # fmt: skip
        require(self.broadcast_timeout_s > 0, "weights.broadcast_timeout_s", "> 0", self.broadcast_timeout_s,
                 "20 is the default")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    env_server: EnvServerConfig = field(default_factory=EnvServerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def check_sections(config: Config) -> None:
    """Checks that need two sections. Raises ConfigError."""
    replay, learner = config.replay, config.learner
    slowest_lag = replay.target_lag + (learner.publish_every - 1) + (replay.max_uses - 1)
    require(replay.max_lag >= slowest_lag, "replay.max_lag",
             f">= replay.target_lag + learner.publish_every + replay.max_uses - 2 = {slowest_lag}", replay.max_lag,
             "else work would be dropped that was admitted on purpose")  # fmt: skip
    require(config.sampling.max_turn_tokens < config.model.max_tokens, "sampling.max_turn_tokens",
             f"< model.max_tokens = {config.model.max_tokens}", config.sampling.max_turn_tokens,
             "a turn must fit the context")  # fmt: skip
    kept_bytes = 4 * config.sampling.top_k * config.model.max_tokens
    require(kept_bytes <= replay.max_trajectory_bytes // 2, "sampling.top_k",
             f"at most replay.max_trajectory_bytes / 8 / model.max_tokens = "
             f"{replay.max_trajectory_bytes // 8 // config.model.max_tokens}", config.sampling.top_k,
             "an episode records what every token was chosen from; or raise replay.max_trajectory_bytes")  # fmt: skip
    require(replay.group_size >= 2 or not config.objective.compares_siblings, "replay.group_size",
             f">= 2 with objective.advantage {config.objective.advantage}", replay.group_size,
             "it compares siblings; gae and reinforce_pp do not")  # fmt: skip
    num_shards = config.redis.num_shards
    require(replay.groups_per_step % num_shards == 0, "replay.groups_per_step", f"a multiple of {num_shards}",
             replay.groups_per_step, "a step takes as many from redis.url as from each of redis.shards")  # fmt: skip
    require(learner.micro_batch_tokens >= config.model.max_tokens, "learner.micro_batch_tokens",
             f">= model.max_tokens = {config.model.max_tokens}", learner.micro_batch_tokens,
             "the longest episode must fit in one forward pass")  # fmt: skip


def load_config(path: str | None, overrides: list[str], *, presets: Sequence[str] = ()) -> Config:
    """Return the configuration of YAML file `path` (None for the defaults) with `overrides` applied.

    `presets` are further files of differences, each over those before it.

    Raises ConfigError for a missing file, a key that does not exist (with the nearest one that does), a value of the
    wrong type or out of range, and sections that contradict each other.
    """
    structured = OmegaConf.structured(Config)
    try:
        for file in [*([path] if path is not None else []), *presets]:
            if not Path(file).is_file():
                raise ConfigError(f"no config file at {file}; conf/ holds those that come with Slipstream")
            structured = _merged(structured, OmegaConf.load(file))
        structured = _merged(structured, OmegaConf.from_dotlist(overrides))
        config = OmegaConf.to_object(structured)
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key(str(error.full_key))) from None
    except ValidationError as error:
        told = str(error).splitlines()[0]
        is_section = "is not a subclass" in told
        hint = "; a section holds keys, as env.name=shop, and a preset is a file, as conf/objective/gspo.yaml"
        where = error.full_key or " ".join(overrides) or path
        raise ConfigError(f"`{where}`: {told}{hint if is_section else ''}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    except (yaml.YAMLError, OSError, TypeError) as error:  # TypeError: a list where sections are
        where = " and ".join([path, *presets]) if path is not None else " ".join(overrides)
        raise ConfigError(f"cannot read {where}: {' '.join(str(error).split())}") from None
    assert isinstance(config, Config)
    check_sections(config)
    return config


def _merged(config: Any, changes: Any) -> Any:
    """`config` with `changes`. Options are of one environment: another name begins without those of the one before."""
    name = OmegaConf.select(changes, "env.name") if OmegaConf.is_dict(changes) else None
    if name is not None and name != config.env.name:
        config.env.options = {}
    return OmegaConf.merge(config, changes)


def differences(before: Config, now: Config) -> list[str]:
    """Every setting of `now` that is not as `before`, as `section.key: before -> now`."""
    pairs = ((path, _value(before, path), _value(now, path)) for path in key_paths())
    return [f"{path}: {old!r} -> {new!r}" for path, old, new in pairs if old != new]


def _value(config: Config, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def dump_config(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def key_paths(section: type = Config, prefix: str = "") -> list[str]:
    """Every key as `section.key`."""
    paths = []
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(item.type):
            assert isinstance(item.type, type)
            paths += key_paths(item.type, f"{prefix}{item.name}.")
        else:
            paths.append(prefix + item.name)
    return paths


def _unknown_key(key: str) -> str:
    sections = [item.name for item in dataclasses.fields(Config)]
    known = [path for path in key_paths() if "." in key] or sections
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    same_leaf = [path for path in key_paths() if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    suggestion = (same_leaf or near or [""])[0]
    hint = f"; did you mean `{suggestion}`?" if suggestion else "; `slipstream up --help` lists every key"
    return f"unknown config key `{key}`{hint}"
