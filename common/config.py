"""The configuration: dataclasses, one YAML file of differences, and `a.b=c` overrides.

Only `load_config` uses OmegaConf; all other code gets plain dataclasses, and each component gets only its own section.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from common.actors_config import ActorsConfig
from common.config_error import ConfigError, require
from common.env_config import TOOLS, EnvConfig
from common.imported import is_own
from common.kept_sets import MAX_TOP_K
from common.objective_config import ObjectiveConfig

RECIPES = Path(__file__).parents[1] / "conf"  # in the repository, and beside the packages of a wheel
# Not sections, although they look like some: their keys are options of these verbs.
OPTIONS_OF = {"launch": "launch", "fit": "sft", "collect": "collect", "env_server": "envs serve"}
MAX_CHUNK_BYTES = 64 << 20  # the most memory that a publisher uses for one request


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"  # the directory under `root`, and a part of every Redis key
    root: str = "runs"  # the folder of all run directories
    seed: int = 0  # for the model, the order of tasks, and the sampling of every member
    rerun_of: str = ""  # the run under `root` whose archive the learner trains on; empty: train on actors' trajectories

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name) is not None,
            "run.name",
            "1 to 64 letters, digits, '.', '_' or '-'",
            self.name,
            "choose another name",
        )
        require(
            self.rerun_of != self.name,
            "run.rerun_of",
            "another run than run.name",
            self.rerun_of,
            "choose another run.name",
        )


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    hidden_size: int = 96  # width of the residual stream
    intermediate_size: int = 256  # width of the MLP
    num_layers: int = 3  # decoder layers
    num_heads: int = 3  # attention heads, each of head_dim
    num_kv_heads: int = 3  # key-value heads; divides num_heads
    head_dim: int = 32  # vLLM's CPU build takes 32, 64 or 128
    num_tasks: int = 400  # train tasks whose text defines the vocabulary

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "num_tasks"):
            value = getattr(self, name)
            require(value >= 1, f"model.tiny.{name}", ">= 1", value, "leave it out for the default")
        require(
            self.head_dim in (32, 64, 128),
            "model.tiny.head_dim",
            "32, 64 or 128",
            self.head_dim,
            "vLLM's CPU attention has no other",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.tiny.num_kv_heads",
            "a divisor of num_heads",
            self.num_kv_heads,
            f"num_heads is {self.num_heads}",
        )


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: int = 0  # of the adapters; then only adapters are trained; 0: off, every weight is trained
    alpha: int = 32  # an adapter is scaled by alpha / rank
    target_modules: list[str] = field(default_factory=list)  # suffixes of layer names; empty: all linear but the head

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", ">= 0", self.rank, "16 is usual, 0 trains every weight")
        require(self.alpha >= 1, "model.lora.alpha", ">= 1", self.alpha, "32 is usual")
        require(
            all(self.target_modules),
            "model.lora.target_modules",
            "names like q_proj",
            self.target_modules,
            "leave it empty for every linear layer but the head",
        )


def is_jinja_value(value: object) -> bool:
    """Whether the Python text of `value` is a Jinja expression of the same value."""
    match value:
        case dict():
            return all(isinstance(key, str) and is_jinja_value(each) for key, each in value.items())
        case list():
            return all(map(is_jinja_value, value))
        case float():
            return math.isfinite(value)
    return value is None or isinstance(value, str | int)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # a Hugging Face folder, or an id of its Hub; empty: make the tiny model of model.tiny
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dtype: str = "auto"  # of the forward pass: float32, bfloat16, auto (on a CPU the former); master weights: float32
    max_tokens: int = 512  # context length: a prompt with its reply is never longer
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template, like enable_thinking
    history: str = "template"  # earlier replies as the chat template shows them, or as they were sampled: sampled
    context: str = "stop"  # where an episode fills it: stop, window, summary, or `module:function`
    tool_parser: str = ""  # vLLM's parser of tool calls by its name, like hermes; empty: calls stay text
    reasoning_parser: str = ""  # vLLM's parser of thoughts by its name, like qwen3; empty: thoughts stay text
    roles: str = "as_sent"  # alternate: for templates that refuse system messages, tool results or two users in a row

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            "model.dtype",
            "auto, float32 or bfloat16",
            self.dtype,
            "auto chooses by the device",
        )
        require(self.max_tokens >= 16, "model.max_tokens", ">= 16", self.max_tokens, "a whole episode must fit")
        for name, value in self.template_arguments.items():
            require(
                name.isidentifier() and is_jinja_value(value),
                f"model.template_arguments.{name}",
                "a name, and a value of text, finite numbers, true, false, null, lists and mappings",
                value,
                "see the variables of the chat template",
            )
        require(
            self.history in ("template", "sampled"),
            "model.history",
            "template or sampled",
            self.history,
            "see docs/models.md",
        )
        require(
            self.context in ("stop", "window", "summary") or is_own(self.context),
            "model.context",
            "stop, window, summary, or module:function for your own",
            self.context,
            "see docs/models.md",
        )
        require(
            self.context == "stop" or self.history == "template",
            "model.history",
            f"template with model.context={self.context}",
            self.history,
            "a conversation that was shortened is rendered by the template",
        )
        require(
            self.roles in ("as_sent", "alternate"),
            "model.roles",
            "as_sent or alternate",
            self.roles,
            "see docs/models.md",
        )


@dataclass(kw_only=True, slots=True)
class RedisConfig:
    url: str = ""  # redis://host:port or another form of docs/running.md; empty: `slipstream up` starts a server
    shards: list[str] = field(default_factory=list)  # more servers for groups, without passwords; '' is `url` again

    def __post_init__(self) -> None:
        require(
            not any("@" in shard for shard in self.shards),
            "redis.shards",
            "URLs without user and password",
            f"{len(self.shards)} URLs",
            "user and password of redis.url are used for all",
        )

    @property
    def num_shards(self) -> int:
        """The number of servers, or of hash slots, over which groups are distributed."""
        return 1 + len(self.shards)


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    temperature: float = 1.0  # of training episodes
    top_p: float = 1.0  # sample from the most likely tokens that have this total probability; 1: off
    top_k: int = 0  # sample from this many most likely tokens, and record them with every token; 0: off
    max_turn_tokens: int = 32  # a generation ends here

    def __post_init__(self) -> None:
        require(
            self.temperature > 0,
            "sampling.temperature",
            "> 0",
            self.temperature,
            "training episodes are sampled; evaluation adds a greedy pass of its own",
        )
        require(self.max_turn_tokens >= 1, "sampling.max_turn_tokens", ">= 1", self.max_turn_tokens, "try 32")
        require(0 < self.top_p <= 1, "sampling.top_p", "in (0, 1]", self.top_p, "1 is off")
        require(
            self.top_k == 0 or 2 <= self.top_k <= MAX_TOP_K,
            "sampling.top_k",
            f"0, or in [2, {MAX_TOP_K}]",
            self.top_k,
            "0 is off; with 1 every token has probability 1, and nothing is learned",
        )
        require(
            self.top_p == 1 or self.top_k > 0,
            "sampling.top_k",
            "> 0 where sampling.top_p is below 1",
            self.top_k,
            "the kept set of every token is recorded, and only top_k bounds its size",
        )


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    group_size: int = 8  # sibling attempts at one task
    screen_size: int = 0  # attempts that a group begins with; the others follow if their returns differ; 0: all at once
    groups_per_step: int = 8  # groups that one optimizer step consumes
    target_lag: int = 2  # optimizer steps of work that actors may be ahead; 0 is synchronous
    max_lag: int = 8  # optimizer steps; older tokens are left out of the loss, groups without newer tokens are dropped
    order: str = "oldest"  # which ready groups a step takes: oldest, freshest, uniform or prioritised
    max_uses: int = 1  # the most steps that learn from one group
    keep_fraction: float = 1.0  # fraction of a step's candidates to keep, those whose returns differ most; others drop
    samples_per_insert: float = 0.0  # the average uses of a group; 0: only max_uses limits
    lease_ttl_s: float = 10.0  # an actor that sends no heartbeat for this long loses its leases
    max_attempts: int = 4  # attempts at a member before its group is dropped
    max_trajectory_bytes: int = 8 << 20  # larger trajectories are refused
    archive: bool = True  # write the data of each step to trajectories/; without it the run cannot be re-run
    compress: bool = False  # send and store trajectories in zstd: about a third of the bytes, for CPU time on both ends

    def __post_init__(self) -> None:
        require(1 <= self.group_size <= 4096, "replay.group_size", "1 to 4096", self.group_size, "8 is the default")
        require(
            self.screen_size == 0 or 2 <= self.screen_size < self.group_size,
            "replay.screen_size",
            f"0, or 2 to replay.group_size - 1 = {self.group_size - 1}",
            self.screen_size,
            "0 plays all attempts at once",
        )
        require(self.groups_per_step >= 1, "replay.groups_per_step", ">= 1", self.groups_per_step, "try 8")
        require(
            0 < self.keep_fraction <= 1, "replay.keep_fraction", "in (0, 1]", self.keep_fraction, "1 keeps every group"
        )
        require(
            self.keep_fraction == 1 or self.max_uses == 1,
            "replay.keep_fraction",
            "1 where replay.max_uses > 1",
            self.keep_fraction,
            "a group that was kept once is not a candidate again",
        )
        require(self.target_lag >= 0, "replay.target_lag", ">= 0", self.target_lag, "use 0 for synchronous training")
        require(self.max_lag >= 0, "replay.max_lag", ">= 0", self.max_lag, "use 0 for synchronous training")
        require(
            self.order in ("oldest", "freshest", "uniform", "prioritised"),
            "replay.order",
            "oldest, freshest, uniform or prioritised",
            self.order,
            "oldest is the default",
        )
        require(self.max_uses >= 1, "replay.max_uses", ">= 1", self.max_uses, "1 trains each group once")
        require(
            self.order != "prioritised" or self.max_uses > 1,
            "replay.max_uses",
            ">= 2 where `replay.order` is prioritised",
            self.max_uses,
            "a group gets its score at its first use",
        )
        require(
            self.samples_per_insert == 0 or 1 <= self.samples_per_insert <= self.max_uses,
            "replay.samples_per_insert",
            f"0, or in [1, replay.max_uses = {self.max_uses}]",
            self.samples_per_insert,
            "with 0 only max_uses limits",
        )
        require(1 <= self.lease_ttl_s < math.inf, "replay.lease_ttl_s", ">= 1", self.lease_ttl_s, "try 10")
        require(self.max_attempts >= 1, "replay.max_attempts", ">= 1", self.max_attempts, "1 never repeats an attempt")
        require(
            self.max_trajectory_bytes >= 1,
            "replay.max_trajectory_bytes",
            ">= 1",
            self.max_trajectory_bytes,
            "8 MiB is the default",
        )


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float = 1e-6  # peak learning rate of AdamW
    critic_lr: float = 1e-5  # the critic's peak learning rate; its other settings are the policy's
    weight_decay: float = 0.0  # decoupled
    warmup_steps: int = 0  # steps in which the learning rate rises linearly from 0
    schedule: str = "constant"  # after the warm-up: constant, linear or cosine, down to 0 at the last step
    max_grad_norm: float = 1.0  # global norm; larger gradients are scaled down to it

    def __post_init__(self) -> None:
        for name, usual in (("lr", "1e-6"), ("critic_lr", "1e-5")):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"optim.{name}", "> 0", value, f"{usual} is usual for 7B")
        require(self.max_grad_norm > 0, "optim.max_grad_norm", "> 0", self.max_grad_norm, "inf never clips")
        for name in ("weight_decay", "warmup_steps"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name}", ">= 0", value, "0 is off")
        require(
            self.schedule in ("constant", "linear", "cosine"),
            "optim.schedule",
            "constant, linear or cosine",
            self.schedule,
            "constant is usual for RL",
        )


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100  # optimizer steps of reinforcement learning
    ranks: int = 1  # FSDP processes that `slipstream up` starts, each on a GPU of its own if there are GPUs
    devices: list[str] = field(default_factory=list)  # their GPUs; empty: the first ones, see docs/install.md
    micro_batch_tokens: int = 2048  # the most packed tokens in one forward pass; docs/learner.md on shared prefixes
    logprob_chunk_tokens: int = 1024  # tokens whose logits are in memory at one time
    publish_every: int = 1  # optimizer steps between publishes
    checkpoint_every: int = 20  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # the newest checkpoints that are kept
    claim_timeout_s: float = 600.0  # the run ends with an error if no batch is ready for this long
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # torch.compile each layer at the start; on a CPU this needs a C++ compiler
    cpu_offload: bool = False  # weights, gradients and optimizer state in host memory; for models that do not fit a GPU

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "ranks",
            "micro_batch_tokens",
            "logprob_chunk_tokens",
            "publish_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            require(value >= 1, f"learner.{name}", ">= 1", value, "leave it out for the default")
        require(
            not self.devices or self.ranks <= len(self.devices),
            "learner.ranks",
            f"<= {len(self.devices)}, the number of learner.devices",
            self.ranks,
            "each rank needs a GPU of its own",
        )


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    episodes: int = 0  # expert episodes to imitate before RL; 0 skips the warm start
    noise: float = 0.0  # probability that the expert takes a random admissible action, which is imitated too
    epochs: int = 1  # passes over the episodes
    batch_tokens: int = 4096  # packed tokens in one optimizer step
    lr: float = 1e-3  # AdamW learning rate

    def __post_init__(self) -> None:
        require(0 <= self.noise < 1, "warm_start.noise", "in [0, 1)", self.noise, "0 is the expert without noise")
        require(self.episodes >= 0, "warm_start.episodes", ">= 0", self.episodes, "0 skips the warm start")
        require(self.epochs >= 1, "warm_start.epochs", ">= 1", self.epochs, "1 is one pass")
        require(self.batch_tokens >= 1, "warm_start.batch_tokens", ">= 1", self.batch_tokens, "try 4096")
        require(math.isfinite(self.lr) and self.lr > 0, "warm_start.lr", "> 0", self.lr, "try 1e-3")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    num_tasks: int | None = None  # held-out tasks, each once sampled and once greedy; 0: none; None: 32 if it has any
    every: int = 50  # optimizer steps between evaluations during training; 0: only at the start and the end

    def __post_init__(self) -> None:
        fits = self.num_tasks is None or self.num_tasks >= 0
        require(fits, "eval.num_tasks", ">= 0", self.num_tasks, "0 skips evaluation")
        require(self.every >= 0, "eval.every", ">= 0", self.every, "0 evaluates only at the start and the end")


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    host: str = "127.0.0.1"  # address that the publisher or a relay binds to; other hosts must be able to connect to it
    broadcast_timeout_s: float = 20.0  # a member that takes longer is left out, and pulls
    chunk_bytes: int = 4 << 20  # bytes in one reply to a pull, and in one chunk of a broadcast
    anchor_every: int = 10  # publish a full snapshot every N versions; those between are deltas; 1: no deltas
    disk: str = ""  # path or fsspec URL where versions are also written, for actors.transport=disk; empty: nowhere
    fan_out: int = 8  # receivers that a publisher or a relay serves at a time
    pull_bytes_per_s: int = 0  # the most that a publisher or a relay sends to each receiver; 0: no limit
    key_file: str = ""  # file that `slipstream key` wrote, the same on every host; empty: no authentication
    probe_nats: float = 0.0  # mean difference per token by which an engine's probe may miss the learner's; 0: by dtype

    def __post_init__(self) -> None:
        require(self.probe_nats >= 0, "weights.probe_nats", ">= 0", self.probe_nats, "0 chooses it by model.dtype")
        require(
            0 < self.chunk_bytes <= MAX_CHUNK_BYTES,
            "weights.chunk_bytes",
            f"in [1, {MAX_CHUNK_BYTES}]",
            self.chunk_bytes,
            "the publisher does not send more in one chunk",
        )
        require(self.anchor_every >= 1, "weights.anchor_every", ">= 1", self.anchor_every, "10 is the default")
        require(self.fan_out >= 1, "weights.fan_out", ">= 1", self.fan_out, "8 is the default")
        require(
            self.pull_bytes_per_s == 0 or self.pull_bytes_per_s >= self.chunk_bytes,
            "weights.pull_bytes_per_s",
            f"0, or >= weights.chunk_bytes = {self.chunk_bytes}",
            self.pull_bytes_per_s,
            "lower weights.chunk_bytes",
        )
        require(
            self.broadcast_timeout_s > 0,
            "weights.broadcast_timeout_s",
            "> 0",
            self.broadcast_timeout_s,
            "20 is the default",
        )


@dataclass(kw_only=True, slots=True)
class Config:
    """The configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def check_sections(config: Config) -> None:
    """Run the checks that need two sections. Raises ConfigError."""
    replay, learner = config.replay, config.learner
    slowest_lag = replay.target_lag + (learner.publish_every - 1) + (replay.max_uses - 1)
    require(
        replay.max_lag >= slowest_lag,
        "replay.max_lag",
        f">= replay.target_lag + learner.publish_every + replay.max_uses - 2 = {slowest_lag}",
        replay.max_lag,
        "a lower value would leave out tokens that these settings allow",
    )
    require(
        config.sampling.max_turn_tokens < config.model.max_tokens,
        "sampling.max_turn_tokens",
        f"< model.max_tokens = {config.model.max_tokens}",
        config.sampling.max_turn_tokens,
        "a turn must fit into the context",
    )
    require(
        config.model.context == "stop" or 4 * config.sampling.max_turn_tokens <= config.model.max_tokens,
        "sampling.max_turn_tokens",
        f"at most model.max_tokens / 4 = {config.model.max_tokens // 4} with model.context={config.model.context}",
        config.sampling.max_turn_tokens,
        "prompts take up to three quarters of the context then",
    )
    if config.env.action_format == TOOLS:
        require(
            config.model.tool_parser != "",
            "model.tool_parser",
            "a parser of vLLM with env.action_format=tools",
            "",
            "hermes reads the calls of Qwen2.5 and Qwen3; docs/agents.md names others",
        )
        require(
            config.warm_start.episodes == 0,
            "warm_start.episodes",
            "0 with env.action_format=tools",
            config.warm_start.episodes,
            "an expert writes actions as text; begin with a model that calls tools",
        )
    kept_bytes = 4 * config.sampling.top_k * config.model.max_tokens
    require(
        kept_bytes <= replay.max_trajectory_bytes // 2,
        "sampling.top_k",
        f"at most replay.max_trajectory_bytes / 8 / model.max_tokens = "
        f"{replay.max_trajectory_bytes // 8 // config.model.max_tokens}",
        config.sampling.top_k,
        "an episode records the kept set of every token; or raise replay.max_trajectory_bytes",
    )
    require(
        replay.group_size >= 2 or not config.objective.compares_siblings,
        "replay.group_size",
        f">= 2 with objective.advantage {config.objective.advantage}",
        replay.group_size,
        "it compares the members of a group; gae and reinforce_pp do not",
    )
    require(
        replay.screen_size == 0 or config.objective.compares_siblings,
        "replay.screen_size",
        f"0 with objective.advantage {config.objective.advantage}",
        replay.screen_size,
        "it also learns from groups of equal returns",
    )
    require(
        replay.screen_size == 0 or not config.objective.returns_come_later,
        "replay.screen_size",
        "0 with objective.reward_model",
        replay.screen_size,
        "attempts are compared before the model has scored them",
    )
    num_shards = config.redis.num_shards
    require(
        replay.groups_per_step % num_shards == 0,
        "replay.groups_per_step",
        f"a multiple of {num_shards}",
        replay.groups_per_step,
        "a step takes the same number from each shard",
    )
    require(
        learner.micro_batch_tokens >= config.model.max_tokens,
        "learner.micro_batch_tokens",
        f">= model.max_tokens = {config.model.max_tokens}",
        learner.micro_batch_tokens,
        "the longest episode must fit into one forward pass",
    )


def config_file(name: str) -> Path:
    """The config file of that path or, as a second choice, of the installed `conf/`: then from any folder.

    Raises ConfigError.
    """
    for path in (Path(name), RECIPES / name.removeprefix("conf/")):
        if path.is_file():
            return path
    raise ConfigError(f"no config file at {name}; those that come with Slipstream are in {RECIPES}")


def load_config(
    path: str | None, overrides: list[str], *, presets: Sequence[str | Mapping[str, object]] = ()
) -> Config:
    """Return the configuration of YAML file `path` (None for the defaults) with `overrides` applied.

    `presets` are more differences, each a file or sections with their keys; each one overrides those before it.

    Raises ConfigError for a missing file, an unknown key (the message suggests the nearest known one), a value of the
    wrong type or out of range, and sections that contradict each other. The message names the files if these alone are
    wrong.
    """
    try:
        return _loaded(path, overrides, presets)
    except ConfigError as error:
        files = [file for file in (path, *presets) if isinstance(file, str)]
        if any(file in str(error) for file in files) or not _is_of_files(str(error), files):
            raise
        raise ConfigError(f"{error} (in {' and '.join(files)})") from None


def _is_of_files(message: str, files: Sequence[str]) -> bool:
    """Whether the files alone fail with `message`."""
    try:
        _loaded(None, [], files)
    except ConfigError as error:
        return str(error) == message
    return False


def _loaded(path: str | None, overrides: list[str], presets: Sequence[str | Mapping[str, object]]) -> Config:
    structured = OmegaConf.structured(Config)
    try:
        for preset in [*([path] if path is not None else []), *presets]:
            changes = OmegaConf.load(config_file(preset)) if isinstance(preset, str) else OmegaConf.create(dict(preset))
            structured = _merged(structured, changes)
        structured = _merged(structured, OmegaConf.from_dotlist(overrides))
        config = OmegaConf.to_object(structured)
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key(str(error.full_key), overrides)) from None
    except ValidationError as error:
        message = str(error).splitlines()[0]
        is_section = "is not a subclass" in message
        of_section = (
            "set a key of the section, as in env.name=shop; a preset is a file, such as conf/objective/gspo.yaml"
        )
        of_key = "give the key a value of that type, or remove it; `slipstream --help` lists every key"
        where = error.full_key or " ".join(overrides) or path
        raise ConfigError(f"`{where}`: {message}; {of_section if is_section else of_key}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    except (yaml.YAMLError, OSError, TypeError, UnicodeError) as error:  # TypeError: a list instead of sections
        files = [file for file in (path, *presets) if isinstance(file, str)]
        where = " and ".join(files) or " ".join(overrides)
        raise ConfigError(f"cannot read {where}: {' '.join(str(error).split())}; correct it") from None
    assert isinstance(config, Config)
    check_sections(config)
    return config


def _merged(config: Any, changes: Any) -> Any:
    """`config` with `changes`. A changed env.name clears env.options: they belong to one environment."""
    name = OmegaConf.select(changes, "env.name") if OmegaConf.is_dict(changes) else None
    if name is not None and name != config.env.name:
        config.env.options = {}
    return OmegaConf.merge(config, changes)


def differences(before: Config, now: Config) -> list[str]:
    """Every setting that differs between two configurations, as `section.key: before -> now`."""
    pairs = ((path, value_of(before, path), value_of(now, path)) for path in key_paths())
    return [f"{path}: {old!r} -> {new!r}" for path, old, new in pairs if old != new]


def value_of(config: Config, path: str) -> object:
    """The value of the setting `path`, as `section.key`."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def dump_config(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def key_paths(section: type = Config, prefix: str = "") -> list[str]:
    """All keys, each as `section.key`."""
    paths = []
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(item.type):
            assert isinstance(item.type, type)
            paths += key_paths(item.type, f"{prefix}{item.name}.")
        else:
            paths.append(prefix + item.name)
    return paths


def _unknown_key(key: str, overrides: list[str]) -> str:
    if key in OPTIONS_OF:
        names = [text.partition("=")[0].partition(".")[2] for text in overrides if text.startswith(f"{key}.")]
        options = " ".join(f"--{name.replace('_', '-')}" for name in names) or "--help"
        return f"`{key}` is no section: its keys are options of a verb; use `slipstream {OPTIONS_OF[key]} {options}`"
    sections = [item.name for item in dataclasses.fields(Config)]
    known = [path for path in key_paths() if "." in key] or sections
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    same_leaf = [path for path in key_paths() if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    suggestion = (same_leaf or near or [""])[0]
    hint = f"; did you mean `{suggestion}`?" if suggestion else "; `slipstream --help` lists every key"
    return f"unknown config key `{key}`{hint}"
