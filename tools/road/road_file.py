"""Reads a road: the stages from a base model to an agent, each with its differences from a shared configuration.

    config: conf/quickstart.yaml        # one file of settings, or a list of them
    set: {warm_start: {episodes: 0}}    # settings of all stages
    stages:
      - {name: imitate, kind: sft, options: {data: rows.jsonl}, set: {optim: {lr: 1.0e-3}}}

A stage's model is the model of the last stage before it that trained one. All paths follow from the names, so the whole
road is checked before its first stage starts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config, config_file, load_config
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.connection import without_password
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.yaml_file import read_yaml
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.run.check_input import check_collect, check_env, check_input, check_model_folder
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.terminal.options import options_from

KINDS = ("collect", "rejection", "sft", "dpo", "reward", "prm", "rl")
COLLECTING = ("collect", "rejection")  # kinds that write rows
FITTING = ("rejection", "sft", "dpo", "reward", "prm")
JUDGING = ("reward", "prm")  # kinds whose model is named as objective.reward_model, or as the option reward_model
TRAINING = ("rejection", "sft", "dpo", "rl")  # kinds whose model the next stage begins with
BASE = "base"
KEYS = {"road": ("config", "set", "stages"), "stage": ("name", "kind", "options", "set")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage, with every path that it needs."""

    name: str
    kind: str  # one of KINDS
    config: Config  # the whole configuration of its run
    collect: CollectOptions | None
    fit: FitOptions | None
    rows: Path  # what a collecting stage writes

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run.root, self.config.run.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Road:
    """All stages, and the shared configuration, with which every model is evaluated."""

    config: Config
    base: Config  # of the run that makes the tiny model, if `model.path` is empty
    stages: Sequence[Stage]

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run.root, self.config.run.name)

    @property
    def base_model(self) -> Path:
        """The folder of the model that the road begins with."""
        made = RunDir(self.base.run.root, self.base.run.name).model
        return Path(self.config.model.path) if self.config.model.path else made


def read_road(name: str, overrides: Sequence[str]) -> Road:
    """Read the file `name`, of the present folder or the installed `conf/`. Raises ConfigError, with the stage."""
    path = config_file(name)
    content = _mapping(read_yaml(path, ""), str(path), "road")
    files = content.get("config", [])
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(f"{path}: `config` must name a YAML file or several, got {files!r}; correct it")
    presets = [*files, _settings(content, str(path))]
    config = _without_password(load_config(None, list(overrides), presets=presets))
    listed = content.get("stages")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: `stages` must be a list of at least one stage, got {listed!r}; see docs/road.md")
    run = config.run.name
    base = load_config(None, [*overrides, f"run.name='{run}-{BASE}'", "warm_start.episodes=0"], presets=presets)
    road = Road(config=config, base=_without_password(base), stages=[])
    stages: list[Stage] = []
    for number, item in enumerate(listed, start=1):
        stage = _mapping(item, f"{path}, stage {number}", "stage")
        where = f"{path}, stage {stage.get('name', number)!r}"
        try:
            stages.append(_stage(stage, road, stages, presets=presets, overrides=overrides))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return Road(config=config, base=road.base, stages=stages)


def check_road(road: Road, *, first: int) -> None:
    """Check what the stages from index `first` on refer to. Raises ConfigError, with the stage."""
    if road.config.model.path:
        check_model_folder(road.base_model, max_tokens=road.config.model.max_tokens)
    check_env(road.config.env)
    for stage in road.stages[first:]:
        try:
            _check(stage, road)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name!r}: {error}") from None


def _check(stage: Stage, road: Road) -> None:
    if stage.collect:
        check_env(stage.config.env)
        check_collect(stage.config, stage.collect)
    made = {str(each.rows) for each in road.stages}
    if stage.fit and stage.fit.data not in made and not Path(stage.fit.data).is_file():
        earlier = ", ".join(each.name for each in road.stages if each.kind in COLLECTING) or "none"
        raise ConfigError(
            f"`data` must be a file of conversations, or an earlier stage that collects ({earlier}), got "
            f"{stage.fit.data!r}"
        )
    judges = [each for each in road.stages if each.kind in JUDGING]
    trained = {str(each.run_dir.trained_model) for each in judges}
    for key, judge in (
        ("objective.reward_model", stage.config.objective.reward_model),
        ("reward_model", stage.collect.reward_model if stage.collect else ""),
    ):
        is_served = key == "reward_model" and judge.startswith(("http://", "https://"))
        if judge and not is_served and not Path(judge).is_dir() and judge not in trained:
            raise ConfigError(
                f"`{key}` must be a folder, or an earlier stage of the kind reward or prm "
                f"({', '.join(each.name for each in judges) or 'none'}), got {judge!r}"
            )
    teacher = stage.config.objective.reference_model
    teachers = [each for each in road.stages if each.kind in TRAINING]
    known = {str(each.run_dir.trained_model) for each in teachers}
    if teacher and not (stage.config.objective.teacher_url or Path(teacher).is_dir() or teacher in known):
        raise ConfigError(
            f"`objective.reference_model` must be a folder, or an earlier stage that trains a model "
            f"({', '.join(each.name for each in teachers) or 'none'}), got {teacher!r}"
        )
    if stage.kind == "rl":
        path = stage.config.model.path
        stage.config.model.path = road.config.model.path  # the stage's own model does not exist yet
        try:
            check_input(stage.config, to_come=trained | known)
        finally:
            stage.config.model.path = path


def _stage(
    given: Mapping[str, Any],
    road: Road,
    before: Sequence[Stage],
    *,
    presets: Sequence[str | Mapping[str, object]],
    overrides: Sequence[str],
) -> Stage:
    name, kind = given.get("name"), given.get("kind")
    taken = [BASE, *(stage.name for stage in before)]
    require(
        isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is not None and name not in taken,
        "name",
        f"lower-case letters, digits, '-' or '_', and none of {', '.join(taken)}",
        name,
        "choose another name",
    )
    require(kind in KINDS, "kind", f"one of {', '.join(KINDS)}", kind, "see docs/road.md")
    settings = _settings(given, "it")
    if "path" in (settings.get("model") or {}):
        raise ConfigError("`model.path` is the model of the stage before; set it for the whole road, under `set`")
    trained = [stage for stage in before if stage.kind in TRAINING]
    model = trained[-1].run_dir.trained_model if trained else road.base_model
    imposed = [f"run.name='{road.config.run.name}-{name}'", f"model.path='{model}'"]
    if kind == "rl" and "eval" not in settings:
        imposed.append("eval.num_tasks=0")  # the road evaluates the model after the stage
    config = _without_password(load_config(None, [*overrides, *imposed], presets=[*presets, settings]))
    judges = {stage.name: stage for stage in before if stage.kind in JUDGING}
    if config.objective.reward_model in judges:
        config.objective.reward_model = str(judges[config.objective.reward_model].run_dir.trained_model)
    teachers = {stage.name: stage for stage in trained}
    if config.objective.reference_model in teachers:
        config.objective.reference_model = str(teachers[config.objective.reference_model].run_dir.trained_model)
    rows = road.run_dir.path / f"{name}.jsonl"
    collect, fit = _options(given.get("options", {}), kind=str(kind), rows=rows, before=before)
    return Stage(name=str(name), kind=str(kind), config=config, collect=collect, fit=fit, rows=rows)


def _options(
    given: object, *, kind: str, rows: Path, before: Sequence[Stage]
) -> tuple[CollectOptions | None, FitOptions | None]:
    """The options of the verbs that a stage of `kind` runs."""
    if not isinstance(given, dict):
        raise ConfigError(f"`options` must be a mapping of options to values, got {given!r}; correct it")
    values = dict(given)
    if kind == "rejection" and "data" in values:
        raise ConfigError("`data` is what the stage itself collects; leave it out, or use the kind sft")
    collected = {stage.name: stage for stage in before if stage.kind in COLLECTING}
    if kind == "rejection":
        values["data"] = str(rows)
    elif values.get("data") in collected:
        values["data"] = str(collected[values["data"]].rows)
    judges = {stage.name: stage for stage in before if stage.kind in JUDGING}
    if values.get("reward_model") in judges:
        values["reward_model"] = str(judges[values["reward_model"]].run_dir.trained_model)
    of_fit = {name: value for name, value in values.items() if name in FitOptions.__slots__}
    of_collect = {name: value for name, value in values.items() if name not in of_fit}
    if kind == "rejection":
        return options_from(CollectOptions, of_collect), options_from(FitOptions, of_fit)
    if kind == "collect":
        return options_from(CollectOptions, values), None
    if kind in FITTING:
        return None, options_from(FitOptions, values)
    if values:
        raise ConfigError(f"`options` must be empty for the kind rl, got {values}; write settings under `set`")
    return None, None


def _mapping(value: object, where: str, kind: str) -> dict[str, Any]:
    """`value`, which must have no keys but those of `kind`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping with {', '.join(KEYS[kind])}, got {value!r:.80}; correct it")
    unknown = [str(key) for key in value if key not in KEYS[kind]]
    if unknown:
        raise ConfigError(f"{where}: unknown key `{unknown[0]}`; a {kind} has {', '.join(KEYS[kind])}")
    return value


def _settings(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = content.get("set") or {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{where}: `set` must be a mapping of sections to their keys, got {settings!r:.80}; correct it"
        )
    return settings


def _without_password(config: Config) -> Config:
    config.redis.url = without_password(config.redis.url)
    return config
