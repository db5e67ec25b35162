"""Reads a road: the stages from a base model to an agent, each a command of `slipstream`.

    settings: [conf/quickstart.yaml, run.name=shop-road]    # of all stages
    stages:
      - expert: collect --expert --num-tasks=2500
      - imitate: fit sft --data=@expert optim.lr=1e-3           # @expert: the rows, or the model, of an earlier stage
      - explore: up learner.steps=60

A stage begins with the model of the last stage before it that trained one. All paths follow from the names, so the
whole road is checked before its first stage starts.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.common.config.config import Config, config_file, is_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.yaml_file import read_yaml
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.cli import load, parsed
from slipstream.tools.cli.verb_table import VERBS
from slipstream.tools.run.check_input import check_collect, check_env, check_input, check_model_folder
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.terminal.options import as_arguments, options_of

KINDS = ("collect", "fit sft", "fit dpo", "fit reward", "fit prm", "up")  # verbs that a stage can be
TRAINING = ("base", "fit sft", "fit dpo", "up")  # those whose model the next stage begins with, and that are evaluated
# What the road itself gives to each stage, or what would only print.
OWN = ("run.name=", "run.root=", "model.path=", "--resume", "--print-config", "--dry-run")

Named = dict[Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")], str]


class RoadFile(msgspec.Struct, forbid_unknown_fields=True):
    stages: Annotated[list[Annotated[Named, Meta(min_length=1, max_length=1)]], Meta(min_length=1)]
    settings: list[str] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One command, and what it makes."""

    name: str
    config: Config
    command: list[str]  # the verb, "base" for the making of the tiny model, and its options
    options: CollectOptions | FitOptions | None
    made: Path  # the rows, or the folder of the model

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run.root, self.config.run.name)


def split_road(settings: Sequence[str]) -> tuple[str, list[str]]:
    """The file with stages in `settings`, empty if none has, and the settings with those of that file before them.

    Raises ConfigError.
    """
    for word in settings:
        if is_config(word) and _has_stages(config_file(word)):
            return word, [*read_file(word).settings, *(other for other in settings if other != word)]
    return "", list(settings)


def _has_stages(file: Path) -> bool:
    """Whether it is a file of stages; not if it cannot be read, which the reader of configurations explains."""
    try:
        found = read_yaml(file, "")
    except ConfigError:
        return False
    return isinstance(found, dict) and "stages" in found


def read_file(name: str) -> RoadFile:
    """Read the file `name`, of the present folder or the installed `conf/`. Raises ConfigError."""
    try:
        return msgspec.convert(read_yaml(config_file(name), ""), RoadFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name}: {error}; a road has lists of `settings`, and of `stages` as NAME: COMMAND"
        ) from None


def read_stages(name: str, settings: Sequence[str], shared: Config) -> list[Stage]:
    """The base model and the stages of the file `name`; `shared` is the configuration of `settings`.

    Raises ConfigError, with the stage.
    """
    model = [f"model.path='{shared.model.path}'"] if shared.model.path else []  # it may have been an id of the Hub
    base = load(parsed(["up", *settings, *model, f"run.name='{shared.run.name}-base'", "warm_start.episodes=0"]))
    made = Path(shared.model.path or RunDir(base.run.root, base.run.name).model)
    stages = [Stage(name="base", config=base, command=["base"], options=None, made=made)]
    for title, command in (item for listed in read_file(name).stages for item in listed.items()):
        try:
            stages.append(_stage(title, shlex.split(command), stages, settings, shared))
        except ValueError as error:  # a ConfigError, or that of a quotation without an end
            raise ConfigError(f"{name}: stage {title!r}: {error}") from None
    return stages


def check_stages(stages: Sequence[Stage], *, finished: Collection[str]) -> None:
    """Check what the stages that have not finished refer to. Raises ConfigError, with the stage."""
    to_come = {str(stage.made) for stage in stages}
    if path := stages[0].config.model.path:
        check_model_folder(Path(path), max_tokens=stages[0].config.model.max_tokens)
    for stage in (stage for stage in stages if stage.name not in finished):
        try:
            check_env(stage.config.env)
            match stage.options:
                case CollectOptions() as options:
                    check_collect(stage.config, options, to_come=to_come)
                case FitOptions(data=data) if data not in to_come and not Path(data).is_file():
                    raise ConfigError(f"`--data` must be a file, or an earlier stage as @NAME, got {data!r}")
                case None if stage is not stages[0]:
                    check_input(stage.config, to_come=to_come)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name!r}: {error}") from None


def _stage(name: str, words: list[str], before: Sequence[Stage], settings: Sequence[str], shared: Config) -> Stage:
    """Load the configuration and the options as the command line does."""
    if name in (taken := [stage.name for stage in before]):
        raise ConfigError(f"the name is taken, as {', '.join(taken)} are; choose another")
    verb, *rest = [_with_path(word, before) for word in words] or [""]
    if verb == "fit" and rest:
        verb, *rest = f"{verb} {rest[0]}", *rest[1:]
    if verb not in KINDS:
        raise ConfigError(f"the command must begin with one of {', '.join(KINDS)}, got {verb!r}; see docs/road.md")
    if refused := [word for word in rest if word.startswith(OWN)]:
        raise ConfigError(f"`{refused[0]}` cannot be of a stage; leave it out, or set it under `settings`")
    rows = RunDir(shared.run.root, shared.run.name).path / f"{name}.jsonl"
    model = next(stage.made for stage in reversed(before) if stage.command[0] in TRAINING)
    file, off = ([str(rows)], []) if verb == "collect" else ([], ["eval.num_tasks=0"])  # the road evaluates
    own = [f"run.name='{shared.run.name}-{name}'", f"model.path='{model}'"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            arguments = parsed([*verb.split(), *file, *settings, *off, *rest, *own])
        except SystemExit:
            raise ConfigError(said.getvalue().strip().rpartition("\n")[2]) from None
    config, kind = load(arguments), VERBS[verb].own
    options = options_of(kind, arguments) if kind else None
    made = rows if file else RunDir(config.run.root, config.run.name).trained_model
    command = [verb, *(as_arguments(options) if options else [])]
    return Stage(name=name, config=config, command=command, options=options, made=made)


def _with_path(word: str, before: Sequence[Stage]) -> str:
    """`word` with what a stage has made in the place of `@NAME`."""
    if (found := re.fullmatch(r"((?:[^=@]*=)?)@([^@]*)", word)) is None:
        return word
    made = {stage.name: str(stage.made) for stage in before}
    if found[2] not in made:
        raise ConfigError(f"`{word}` must name an earlier stage: {', '.join(made)}")
    is_setting = found[1] and not word.startswith("-")
    return f"{found[1]}'{made[found[2]]}'" if is_setting else found[1] + made[found[2]]
