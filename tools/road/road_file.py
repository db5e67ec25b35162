"""Reads a road: the stages from a base model to an agent, each a command of `slipstream`.

    settings: [conf/quickstart.yaml, run.name=shop-road]    # of all stages
    stages:
      - expert: collect --expert --num-tasks=2500
      - imitate: fit sft --data=@expert optim.lr=1e-3           # @expert: the rows, or the model, of an earlier stage
      - explore: up learner.steps=60
      - again:                                              # up to three times, until a round gains nothing
          rounds: 3
          stages:
            - play: collect --num-tasks=200
            - best: fit sft --data=@play --best-of-group=2

A stage begins with the model of the last stage before it that trained one. All paths follow from the names, so the
whole road is checked before its first stage starts.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.common.config.config import Config, config_file, is_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.yaml_file import read_yaml
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.cli import load, parsed, setting
from slipstream.tools.cli.verb_table import VERBS
from slipstream.tools.run.check_input import check_collect, check_env, check_input, check_model_folder
from slipstream.tools.run.collect_options import DEFAULT_NUM_TASKS, CollectOptions
from slipstream.tools.terminal.options import as_arguments, options_of

KINDS = ("collect", "fit sft", "fit dpo", "fit reward", "fit prm", "up")  # verbs that a stage can be
# Those whose model the next stage begins with. All but "rounds" are evaluated.
TRAINING = ("base", "fit sft", "fit dpo", "up", "rounds")
WITH_ROWS = ("collect", "up")
# What the road itself gives to each stage, or what would only print.
OWN = ("run.name=", "run.root=", "model.path=", "--resume", "--print-config", "--dry-run")

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
OneOf = Meta(min_length=1, max_length=1)


class Rounds(msgspec.Struct, forbid_unknown_fields=True):
    """Stages that are repeated, each round from the model of the one before, until a round gains nothing."""

    rounds: Annotated[int, Meta(ge=1, le=100)]  # at most
    stages: Annotated[list[Annotated[dict[Name, str], OneOf]], Meta(min_length=1)]


class RoadFile(msgspec.Struct, forbid_unknown_fields=True):
    stages: Annotated[list[Annotated[dict[Name, str | Rounds], OneOf]], Meta(min_length=1)]
    settings: list[str] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One command, and what it makes."""

    name: str
    config: Config
    command: list[str]  # the verb and its options; "base" makes the tiny model, "rounds" takes that of the best round
    options: CollectOptions | FitOptions | None
    made: Path  # the rows, or the folder of the model
    rows: Path | None = None  # of `collect`; of `up` the episodes that it trained on, once a later stage asks for them
    part: tuple[str, int] = ("", 0)  # of which rounds, and of which one

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run.root, self.config.run.name)

    @property
    def reads(self) -> str:
        """The file of rows that it reads; empty if none."""
        return self.options.data if isinstance(self.options, FitOptions) else ""


def split_road(settings: Sequence[str]) -> tuple[str, list[str]]:
    """The file with stages in `settings`, if one has, and the settings after those of that file. Raises ConfigError."""
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
    """The base model and the stages of file `name`; `settings` give `shared`. Raises ConfigError, with the stage."""
    model = [setting("model.path", shared.model.path)] if shared.model.path else []  # it may have been an id of the Hub
    name_of_base = setting("run.name", f"{shared.run.name}-base")
    base = load(parsed(["up", *settings, *model, name_of_base, "warm_start.episodes=0"]))
    made = Path(shared.model.path or RunDir(base.run.root, base.run.name).model)
    stages = [Stage(name="base", config=base, command=["base"], options=None, made=made)]
    for title, given in (item for listed in read_file(name).stages for item in listed.items()):
        try:
            if isinstance(given, Rounds):
                stages += _rounds(title, given, stages, settings, shared)
            else:
                stages.append(_stage(title, shlex.split(given), stages, settings, shared))
        except ValueError as error:  # a ConfigError, or that of a quotation without an end
            raise ConfigError(f"{name}: stage {title!r}: {error}") from None
    return stages


def check_stages(stages: Sequence[Stage], *, finished: Collection[str]) -> None:
    """Check what the stages that have not finished refer to. Raises ConfigError, with the stage."""
    to_come = {str(path) for stage in stages for path in (stage.made, stage.rows) if path}
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
                case None if stage.command[0] == "up":
                    check_input(stage.config, to_come=to_come)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name!r}: {error}") from None


def _rounds(
    title: str, given: Rounds, before: Sequence[Stage], settings: Sequence[str], shared: Config
) -> Iterable[Stage]:
    """The stages of every round, as TITLE-1-NAME and so on, and one that takes the model of the last good round."""
    stages, first = list(before), len(before)
    own = re.compile(f"@({'|'.join(name for listed in given.stages for name in listed)})$")
    for number in range(1, given.rounds + 1):
        for name, command in (item for listed in given.stages for item in listed.items()):
            words = [own.sub(rf"@{title}-{number}-\1", word) for word in shlex.split(command)]
            stage = _stage(f"{title}-{number}-{name}", words, stages, settings, shared, number=number)
            stages.append(replace(stage, part=(title, number)))
    if not any(stage.command[0] in TRAINING for stage in stages[first:]):
        raise ConfigError("no stage of its rounds trains the model; add `fit sft`, `fit dpo` or `up`")
    config = load(parsed(["up", *settings, setting("run.name", f"{shared.run.name}-{title}")]))
    made, verb = RunDir(config.run.root, config.run.name).trained_model, ["rounds", str(given.rounds)]
    return [*stages[first:], Stage(name=title, config=config, command=verb, options=None, made=made)]


def _stage(
    name: str, words: list[str], before: Sequence[Stage], settings: Sequence[str], shared: Config, number: int = 1
) -> Stage:
    """Load the configuration and the options as the command line does. `number` is that of the round."""
    if name in (taken := [stage.name for stage in before]):
        raise ConfigError(f"the name is taken, as {', '.join(taken)} are; choose another")
    verb, *rest = [_with_path(word, after, before) for after, word in zip(["", *words], words, strict=False)] or [""]
    if verb == "fit" and rest:
        verb, *rest = f"{verb} {rest[0]}", *rest[1:]
    if verb not in KINDS:
        raise ConfigError(f"the command must begin with one of {', '.join(KINDS)}, got {verb!r}; see docs/road.md")
    if refused := [word for word in rest if word.startswith(OWN)]:
        raise ConfigError(f"`{refused[0]}` cannot be of a stage; leave it out, or set it under `settings`")
    rows = RunDir(shared.run.root, shared.run.name).path / f"{name}.jsonl"
    model = next(stage.made for stage in reversed(before) if stage.command[0] in TRAINING)
    file, off = ([str(rows)], []) if verb == "collect" else ([], ["eval.num_tasks=0"])  # the road evaluates
    own = [setting("run.name", f"{shared.run.name}-{name}"), setting("model.path", model)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            arguments = parsed([*verb.split(), *file, *settings, *off, *rest, *own])
        except SystemExit:
            raise ConfigError(said.getvalue().strip().rpartition("\n")[2]) from None
    config, kind = load(arguments), VERBS[verb].own
    options = options_of(kind, arguments) if kind else None
    if isinstance(options, CollectOptions) and number > 1:
        options = replace(options, first_task=_first_task(options, config, number))
    made = rows if file else RunDir(config.run.root, config.run.name).trained_model
    command = [verb, *(as_arguments(options) if options else [])]
    own_rows = rows if verb in WITH_ROWS else None
    return Stage(name=name, config=config, command=command, options=options, made=made, rows=own_rows)


def _first_task(options: CollectOptions, config: Config, number: int) -> int:
    """Where a round begins: after the tasks of the one before; near the first again where too few are left."""
    num_tasks = options.num_tasks or DEFAULT_NUM_TASKS
    last_start = max(options.known_tasks(config.env).values()) - num_tasks
    return (options.first_task + (number - 1) * num_tasks) % (max(last_start, 0) + 1)


def _with_path(word: str, after: str, before: Sequence[Stage]) -> str:
    """`word`, which comes after another, with what a stage has made in the place of `@NAME`."""
    if (found := re.fullmatch(r"((?:[^=@]*=)?)@([^@]*)", word)) is None:
        return word
    wants_rows = (found[1] or f"{after}=") == "--data="
    made = {stage.name: str((wants_rows and stage.rows) or stage.made) for stage in before}
    if found[2] not in made:
        raise ConfigError(f"`{word}` must name an earlier stage: {', '.join(made)}")
    is_setting = found[1] and not word.startswith("-")
    return setting(found[1][:-1], made[found[2]]) if is_setting else found[1] + made[found[2]]
