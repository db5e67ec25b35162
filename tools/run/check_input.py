"""Checks of a configuration that take seconds, before anything is started."""

import asyncio
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config
from slipstream.common.config.env_config import TOOLS, EnvConfig, MixtureEntry
from slipstream.common.process.config_error import ConfigError, reason
from slipstream.common.process.connection import checked_address
from slipstream.common.process.imported import is_own
from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import check_formats
from slipstream.common.transfer.model_folder import check_not_quantised, weight_files
from slipstream.envhub.catalogue import DRIVING, REMOTE, make_any_env, without_held_out
from slipstream.envhub.driving import DrivingEnv
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.rewards.episode import Episode, EpisodeTurn
from slipstream.envhub.rewards.function import MADE_UP, check_call, workers_of
from slipstream.envhub.rewards.part import Part, composed, reward_parts, shown_columns
from slipstream.learner.objective.coherence import REFUSED, check_coherence
from slipstream.tools.run.collect_options import CollectOptions

MIN_FREE_BYTES = 512 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def check_input(config: Config, *, to_come: Collection[str] = ()) -> None:
    """Check what the configuration of a learner refers to: environment, models, address, disk. Raises ConfigError.

    Folders `to_come` are made before the learner starts, so they are not looked at.
    """
    check_coherence(config)
    check_env(config.env)
    for part in config.env.entries().values():
        if part.name in DRIVING and (config.warm_start.episodes or not config.model.path):
            raise ConfigError(
                f"`env.name` {part.name} has no expert: a warm start has nothing to imitate, and a tiny model no "
                "vocabulary; set `model.path`, and `warm_start.episodes` to 0"
            )
        if part.name in DRIVING and config.replay.trees:
            raise ConfigError(
                f"`replay.trees` must be empty with `env.name` {part.name}, got {config.replay.trees!r}: it plays "
                "its episodes itself, so none can begin with the turns of another; leave it out"
            )
        if part.name == "verifiers" and config.model.template_arguments:
            raise ConfigError(
                f"`model.template_arguments` has no effect in `env.name` {part.name}: it renders its prompts itself; "
                "leave it out"
            )
    kinds = {part.name for part in config.env.entries().values()}
    parser = config.model.tool_parser
    if parser and config.env.action_format != TOOLS and not any(name == "agent" or is_own(name) for name in kinds):
        raise ConfigError(
            f"`model.tool_parser` has no effect in `env.name` {', '.join(sorted(kinds))}: only calls of tools and the "
            f"answers to agents are parsed, got {parser!r}; leave it out, or set env.action_format=tools"
        )
    if config.model.context != "stop" and kinds <= set(DRIVING):
        raise ConfigError(
            f"`model.context` {config.model.context} has no effect in `env.name` {', '.join(sorted(kinds))}, whose "
            "conversation is the agent's; leave it out"
        )
    check_held_out(config)
    if config.model.path and config.model.path not in to_come:
        check_model_folder(Path(config.model.path), max_tokens=config.model.max_tokens)
    objective = config.objective  # these two are loaded after the warm start
    for key, folder in (("reward_model", objective.reward_model), ("reference_model", objective.reference_model)):
        if folder and folder not in to_come and not (key == "reference_model" and objective.teacher_url):
            _check_files(f"objective.{key}", Path(folder))
    checked_address(config.weights.host, config.redis.url)
    check_room(config)
    _check_objective(config)  # last, as it takes seconds


def check_held_out(config: Config) -> None:
    """Raise ConfigError if held-out tasks are asked for that no option names."""
    lacking = without_held_out(config.env.entries())
    if config.eval.num_tasks and lacking:
        raise ConfigError(
            f"`eval.num_tasks` is {config.eval.num_tasks}, but `env.options` of {', '.join(lacking)} names no held-out "
            "tasks; set `held_out` there, or `eval.num_tasks=0`"
        )


def check_room(config: Config) -> None:
    """Raise ConfigError if the disk of the run's directory is nearly full."""
    folder = Path(config.run.root).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"`run.root` {config.run.root} has {free / 2**20:.0f} MiB of free disk, and a run needs at "
            f"least {MIN_FREE_BYTES / 2**20:.0f}, for checkpoints and the archive; free some, or set `run.root` to a "
            "folder on another disk"
        )


def _check_objective(config: Config) -> None:
    """Raise ConfigError for an objective that the loss refuses: see `slipstream.learner.probation.bounds`."""
    replay = config.replay
    question = {
        "objective": dataclasses.asdict(config.objective),
        "max_lag": replay.max_lag,
        "max_uses": replay.max_uses,
    }
    if refusal := _refusal(json.dumps(question)):
        raise ConfigError(refusal)


@functools.cache  # the stages of a road often share their objective, and each process takes seconds
def _refusal(question: str) -> str:
    """Why the loss refuses an objective, or "": asked in another process, as a supervisor must not import torch."""
    command = [sys.executable, "-P", "-m", "slipstream.learner.probation.bounds"]
    check = subprocess.run(command, input=question, capture_output=True, text=True)
    if check.returncode not in (0, REFUSED):
        raise RuntimeError(f"`{' '.join(command)}` ended with code {check.returncode}: {check.stderr.strip()}")
    return check.stdout.strip() if check.returncode == REFUSED else ""


def check_env(env: EnvConfig) -> None:
    """Raise ConfigError unless each environment can be made, and its rewards, and there is `env.action_format`."""
    check_formats(env)
    parts = reward_parts(env.entries())
    for label, part in env.entries().items():
        try:
            asyncio.run(_try_env(part, label, parts[label], timeout_s=env.step_timeout_s))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(
                f"`env.name` {part.name!r} with `env.options` {part.options} failed to start: {type(error).__name__}: "
                f"{error}"
            ) from error


async def _try_env(part: MixtureEntry, label: str, rewards: Sequence[Part], *, timeout_s: float) -> None:
    """Make the environment and close it. Raises ValueError if a reward lacks a column, or fails on a made-up reply."""
    env, task = make_any_env(part.name, part.options), Task(env=label, split="train", index=0)
    asked = any(is_own(reward.kind) or shown_columns(reward) for reward in rewards)
    try:
        if not rewards or part.options.get("server_command") or (part.name in REMOTE and not asked):
            return  # its server may start later
        if isinstance(env, DrivingEnv):  # its replies can only be made up by an agent
            _check_columns(rewards, env.columns(task))
            return
        first = await env.reset(task)
        _check_columns(rewards, first.columns)
        episode = _made_up(task, first, await env.step(MADE_UP))
        try:
            composed(episode, rewards, [0.0] * len(rewards))
        except EnvError as error:  # a name is one of the environment's rewards
            raise ValueError(str(error)) from None
        await _rehearse([reward for reward in rewards if is_own(reward.kind)], episode, timeout_s=timeout_s)
    finally:
        await env.close()


def _check_columns(rewards: Sequence[Part], columns: Mapping[str, Any]) -> None:
    """Raise ValueError if a part of the reward needs a column that is not among `columns`."""
    for reward in rewards:
        if is_own(reward.kind):
            check_call(reward.key, reward.kind, columns)
        if missing := sorted(shown_columns(reward) - columns.keys()):
            known = ", ".join(map(str, columns)) or "none"
            raise ValueError(
                f"`{reward.key}`: a judge is shown the columns {', '.join(missing)}, and a task has {known}; correct "
                "`columns`"
            )


def _made_up(task: Task, first: Observation, last: Observation) -> Episode:
    """An episode of one made-up reply."""
    prompt = [{"role": message.role, "content": message.content} for message in first.messages]
    turn = EpisodeTurn(
        reply=MADE_UP,
        action=MADE_UP,
        valid_action=last.valid_action,
        answer="\n".join(message.content for message in last.messages),
        rewards=last.rewards,
        state_key="",
        num_tokens=1,
        finish_reason="stop",
    )
    return Episode(
        task=task,
        columns=first.columns,
        prompt=prompt,
        messages=[*prompt, {"role": "assistant", "content": MADE_UP}],
        ending=[],
        turns=[turn],
        max_turns=1,
        score=last.score,
        success=last.success,
        stop_reason="done",
        completion_ids=[0],
    )


async def _rehearse(functions: Sequence[Part], episode: Episode, *, timeout_s: float) -> None:
    """Raise ValueError if one of the functions fails on `episode`."""
    for reward in functions:
        try:
            await reward.values(episode, timeout_s=timeout_s)
        except Exception as error:  # a user's code may raise anything
            raise ValueError(
                f"`{reward.key}` {reward.kind!r} was tried on the made-up reply {MADE_UP!r} and failed: {error}; it "
                "must return a number, or None, for any reply"
            ) from error
        finally:
            workers_of(reward.kind).end()


def check_collect(config: Config, options: CollectOptions, *, to_come: Collection[str] = ()) -> None:
    """Raise ConfigError for more tasks than there are, or for what the environment does not support.

    Paths `to_come` are made before the episodes are played, so they are not looked at.
    """
    last, most = options.first_task + (options.num_tasks or 1), max(options.known_tasks(config.env).values())
    if last > most:
        known = f"{most}, the number of held-out tasks" if options.held_out else f"env.num_train_tasks = {most}"
        raise ConfigError(f"`--first-task` + `--num-tasks` must be <= {known}, got {last}; lower `--num-tasks`")
    if options.server and (config.env.action_format == TOOLS or config.model.context != "stop"):
        raise ConfigError(
            "`--server` needs another env.action_format than tools, and model.context=stop, got "
            f"{config.env.action_format} and {config.model.context}: a server gets texts, and all of them"
        )
    judge = options.reward_model
    if judge and judge not in to_come and not judge.startswith(("http://", "https://")) and not Path(judge).is_dir():
        raise ConfigError(f"`--reward-model` must be a folder, or the URL of a server, got {judge!r}; correct it")
    from_the_middle = "controls its own episodes, which must be continued from the middle for that"
    given = {
        f"--search {options.search}": (options.search != "none", from_the_middle),
        f"--completions {options.completions}": (options.completions > 0, from_the_middle),
        f"--server {options.server}": (options.server != "", "requests tokens"),
        "--expert": (options.expert, "has no expert"),
    }
    driving = next((part.name for part in config.env.entries().values() if part.name in DRIVING), "")
    for option, (is_given, why) in given.items():
        if driving and is_given:
            raise ConfigError(
                f"`{option}` is not possible for `env.name` {driving}: this environment {why}; leave it out"
            )


def check_model_folder(folder: Path, *, max_tokens: int) -> None:
    """Raise ConfigError unless `folder` has the files of a chat model with a context of `max_tokens`."""
    if not folder.is_dir():
        raise ConfigError(f"`model.path` {folder} is not a directory; name one, or a model of the Hub as MAKER/NAME")
    _check_files("model.path", folder)
    has_template = any((folder / name).is_file() for name in TEMPLATE_FILES)
    if not has_template and "chat_template" not in _read_json(folder / "tokenizer_config.json"):
        raise ConfigError(f"`model.path` {folder}: its tokenizer has no chat template; Slipstream trains chat models")
    longest = _read_json(folder / "config.json").get("max_position_embeddings", max_tokens)
    if isinstance(longest, int) and longest < max_tokens:
        raise ConfigError(
            f"`model.max_tokens` must be <= {longest}, the context of the model in {folder}, got {max_tokens}; lower it"
        )


def check_model_config(folder: Path) -> None:
    """Raise ConfigError unless the config.json of a model, of which no other file is needed, can be read."""
    _check_config("model.path", folder)
    _read_json(folder / "config.json")


def _check_files(key: str, folder: Path) -> None:
    """Raise ConfigError unless `folder`, the value of `key`, has the files of a model."""
    _check_config(key, folder)
    if not weight_files(folder):
        raise ConfigError(f"`{key}` {folder} has no *.safetensors; save the weights with save_pretrained")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"`{key}` {folder} has no tokenizer; save it beside the weights with save_pretrained")


def _check_config(key: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"`{key}` {folder} is not a Hugging Face model folder: it has no config.json; name one, or `hf download` it"
        )
    check_not_quantised(folder)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"`model.path`: {path} is not JSON: {reason(error)}; restore it from a copy") from None
    if not isinstance(content, dict):
        raise ConfigError(f"`model.path`: {path} must hold a JSON object, got a {type(content).__name__}")
    return content
