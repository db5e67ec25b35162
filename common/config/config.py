"""The configuration: dataclasses, one YAML file of differences, and `a.b=c` overrides.

Only `load_config` uses OmegaConf; all other code gets plain dataclasses, and each component gets only its own section.
"""

import copy
import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from slipstream.common.config.actors_config import ActorsConfig
from slipstream.common.config.config_merge import check_presets, merged, read_as_written, with_home, written_in
from slipstream.common.config.env_config import TOOLS, EnvConfig
from slipstream.common.config.learner_config import (
    EvalConfig,
    LearnerConfig,
    OptimConfig,
    WarmStartConfig,
    WeightsConfig,
)
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.config.replay_config import ReplayConfig, SamplingConfig
from slipstream.common.config.suggestion import setting_hint, word_hint
from slipstream.common.process.config_error import ConfigError, reason, require
from slipstream.common.records.trajectory import MAX_TRAJECTORY_BYTES

RECIPES = Path(__file__).parents[2] / "conf"  # in the repository, and beside the packages of a wheel
# Not sections, although they look like some: their keys are options of these verbs.
OPTIONS_OF = {"launch": "launch", "fit": "fit sft", "collect": "collect", "env_server": "serve envs"}


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
        require(0 <= self.seed < 1 << 63, "run.seed", ">= 0 and < 2**63", self.seed, "choose a smaller one")
        require(
            self.rerun_of != self.name,
            "run.rerun_of",
            "another run than run.name",
            self.rerun_of,
            "choose another run.name",
        )


@dataclass(kw_only=True, slots=True)
class RedisConfig:
    url: str = ""  # redis://host:port or another form of docs/running.md; empty: `slipstream up` starts a server


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

    @property
    def last_full_step(self) -> int:
        """Later, fewer and fewer groups are opened, and the episodes that end are those that took longest."""
        return self.learner.steps - self.replay.target_lag - 1

    def require(self, is_met: bool, path: str, contract: str, cure: str) -> None:
        """Raise ConfigError unless `is_met`: the setting at `path` must be `contract`, and `cure` says what to do."""
        require(is_met, path, contract, value_of(self, path), cure)


def check_sections(config: Config) -> None:
    """Run the checks that need two sections. Raises ConfigError."""
    _check_turns(config)
    _check_reward_model(config)
    num_envs = len(config.env.entries())
    config.require(
        not config.eval.num_tasks or config.eval.num_tasks >= num_envs,
        "eval.num_tasks",
        f"0, or >= {num_envs}, the number of environments in env.mixture",
        "an evaluation plays tasks of each",
    )
    replay, learner = config.replay, config.learner
    slowest_lag = replay.target_lag + (learner.publish_every - 1) + (replay.max_uses - 1)
    config.require(
        replay.max_lag >= slowest_lag,
        "replay.max_lag",
        f">= replay.target_lag + learner.publish_every + replay.max_uses - 2 = {slowest_lag}",
        "a lower value would leave out tokens that these settings allow",
    )
    kept_bytes = 4 * config.sampling.top_k * config.model.max_tokens
    config.require(
        kept_bytes <= MAX_TRAJECTORY_BYTES // 2,
        "sampling.top_k",
        f"at most {MAX_TRAJECTORY_BYTES // 8 // config.model.max_tokens} with model.max_tokens = "
        f"{config.model.max_tokens}",
        "an episode records the kept set of every token",
    )
    _check_groups(config)
    config.require(
        learner.micro_batch_tokens >= config.model.max_tokens,
        "learner.micro_batch_tokens",
        f">= model.max_tokens = {config.model.max_tokens}",
        "the longest episode must fit into one forward pass",
    )


def _check_groups(config: Config) -> None:
    """Raise ConfigError unless the objective can compare the members of a group as they are played."""
    replay = config.replay
    config.require(
        replay.group_size >= 2 or not config.objective.compares_siblings,
        "replay.group_size",
        f">= 2 with objective.advantage {config.objective.advantage}",
        "it compares the members of a group; gae and reinforce_pp do not",
    )
    config.require(
        replay.group_size * replay.groups_per_step >= 2 or config.objective.advantage != "reinforce_pp",
        "replay.groups_per_step",
        ">= 2 with objective.advantage reinforce_pp and replay.group_size 1",
        "it compares an attempt with the others of its step",
    )
    config.require(
        not replay.trees or config.env.max_turns > 1,
        "replay.trees",
        "empty with env.max_turns 1",
        "an attempt forks from another after a turn of it, and has a turn of its own",
    )
    late = [*config.env.comparisons(), *(["objective.reward_model"] if config.objective.reward_model else [])]
    config.require(
        not (replay.search and late),
        "replay.trees",
        f"empty or random:N with {', '.join(late)}",
        "a search chooses by the returns of attempts while others have not begun, and that score comes after all",
    )


def _check_reward_model(config: Config) -> None:
    """Raise ConfigError if a part of a reward has the name of the reward that the learner adds."""
    for label, entry in config.env.entries().items():
        config.require(
            not config.objective.reward_model or "reward_model" not in entry.rewards,
            "objective.reward_model",
            f"empty with a part `reward_model` of {label}",
            "the learner's score would replace that part; leave one of them out, or give the part another name",
        )


def _check_turns(config: Config) -> None:
    """Raise ConfigError unless turns fit into the context, and their format into the rest."""
    config.require(
        config.sampling.max_turn_tokens < config.model.max_tokens,
        "sampling.max_turn_tokens",
        f"< model.max_tokens = {config.model.max_tokens}",
        "a turn must fit into the context",
    )
    config.require(
        config.model.context == "stop" or 4 * config.sampling.max_turn_tokens <= config.model.max_tokens,
        "sampling.max_turn_tokens",
        f"at most model.max_tokens / 4 = {config.model.max_tokens // 4} with model.context={config.model.context}",
        "prompts take up to three quarters of the context then",
    )
    if config.env.action_format == TOOLS:
        config.require(
            config.model.tool_parser != "",
            "model.tool_parser",
            "a parser of vLLM with env.action_format=tools",
            "hermes reads the calls of Qwen2.5 and Qwen3; docs/agents.md names others",
        )
        config.require(
            config.warm_start.episodes == 0,
            "warm_start.episodes",
            "0 with env.action_format=tools",
            "an expert writes actions as text; begin with a model that calls tools",
        )


def is_config(word: str) -> bool:
    """Whether a word of the command line names a config file; else it names a run."""
    return word.endswith((".yaml", ".yml")) or Path(word).is_file()


def config_file(name: str) -> Path:
    """The config file of that path, or else of the installed `conf/`, from any folder. Raises ConfigError."""
    for path in (Path(name), RECIPES / name.removeprefix("conf/")):
        if path.is_file():
            return path
    shipped = {path.stem: f"conf/{path.relative_to(RECIPES)}" for path in RECIPES.rglob("*.yaml")}
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    hint = f"did you mean {shipped[near[0]]}? Those" if near else "those"
    raise ConfigError(f"no config file at {name}; {hint} that come with Slipstream are in {RECIPES}")


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
    structured, source = copy.deepcopy(_defaults()), ""
    check_presets([file for file in (path, *presets) if isinstance(file, str)])
    try:
        for preset in [*([path] if path is not None else []), *presets]:
            source = preset if isinstance(preset, str) else "the presets"
            changes = OmegaConf.load(config_file(preset)) if isinstance(preset, str) else OmegaConf.create(dict(preset))
            if isinstance(preset, str):
                read_as_written(changes, yaml.load(config_file(preset).read_text(), yaml.BaseLoader), Config)
            structured = merged(structured, changes)
        source = " ".join(overrides)
        changes = OmegaConf.from_dotlist(overrides)
        read_as_written(changes, written_in(overrides), Config)
        structured = merged(structured, changes)
        config = with_home(OmegaConf.to_object(structured))
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key(str(error.full_key), overrides)) from None
    except OmegaConfBaseException as error:
        where, message, cure = error.full_key or " ".join(overrides) or path, str(error).splitlines()[0], "correct it"
        if "is not a subclass" in message:
            cure = "set a key of the section, as in env.name=shop; a preset is a file, such as conf/objective/gspo.yaml"
        elif isinstance(error, ValidationError):
            cure = "give the key a value of that type, or remove it; `slipstream --help all` lists every key"
        raise ConfigError(f"`{where}`: {message}; {cure}") from None
    except (yaml.YAMLError, OSError, TypeError, UnicodeError, RecursionError) as error:  # TypeError: a list of sections
        raise ConfigError(f"cannot read {source}: {reason(error)}; correct it") from None
    assert isinstance(config, Config)
    check_sections(config)
    return config


@cache
def _defaults() -> Any:
    """What is changed by files and settings; to make it takes longer than all else that is done to load them."""
    return OmegaConf.structured(Config)


def differences(before: Config, now: Config) -> list[str]:
    """Every setting that differs between two configurations, as `section.key: before -> now`."""
    pairs = ((path, value_of(before, path), value_of(now, path)) for path in key_paths())
    return [f"{path}: {old!r} -> {new!r}" for path, old, new in pairs if old != new]


def value_of(config: Config, path: str) -> object:
    """The value of the setting `path`, as `section.key`."""
    value: object = attrgetter(path)(config)
    return value


def dump_config(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


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
    named = {name: value for name, _, value in (text.partition("=") for text in overrides)}
    if key in OPTIONS_OF:
        names = [name.partition(".")[2] for name in named if name.startswith(f"{key}.")]
        options = " ".join(f"--{name.replace('_', '-')}" for name in names) or "--help"
        return f"`{key}` is no section: its keys are options of a verb; use `slipstream {OPTIONS_OF[key]} {options}`"
    sections = [item.name for item in dataclasses.fields(Config)]
    if key in key_paths():
        return f"`{key}` is written in a file as `{key.replace('.', ': {')}: ...{'}' * key.count('.')}`; nest it so"
    if key in sections:  # as in run.=1
        first = next(path for path in key_paths() if path.startswith(f"{key}."))
        return f"`{key}.` has no key after its dot; name one, such as `{first}`; `slipstream --help {key}` lists all"
    hint = setting_hint(key, named.get(key, ""), key_paths()) or word_hint(key, sections)
    return f"unknown config key `{key}`{hint or '; `slipstream --help all` lists every key'}"
