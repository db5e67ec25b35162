"""The verbs of `slipstream`: what each does, the function that runs it, and the settings that it reads."""

import argparse
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.replay.records.ledger import STATES
from slipstream.tools.access.access_users import FleetOption, UsersOptions
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.plan.plan_options import PlanOptions
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.export_options import ExportOptions
from slipstream.tools.see.track.track_options import TrackOptions
from slipstream.tools.serve.serve_options import EnvsOptions, RewardsOptions
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.terminal.options import options_of
from slipstream.tools.viewer.view_options import ViewOptions

# The verbs by what they are for, with one line each. Those of two words in VERBS have their first word here.
GROUPS = {
    "train": {
        "init": "write the files of an environment, an agent or a data set",
        "up": "start a run (alone: the quickstart), or the stages of a file",
        "learner": "train: the learner alone, with actors started by themselves",
        "actors": "play episodes for a run: the actors of one host",
        "fit": "train on recorded conversations: sft, dpo, reward or prm",
        "eval": "measure success on held-out tasks",
    },
    "watch": {
        "runs": "list the runs: state, steps, success, cost",
        "top": "watch a run in the terminal",
        "view": "show a run in a browser, or write a report of several",
        "replay": "inspect the groups, trajectories and steps of a run",
        "track": "send metrics to Weights & Biases, MLflow or Prometheus",
    },
    "data": {
        "collect": "play train tasks, and write the trajectories to a file",
        "data": "filter, mark and split recorded conversations",
        "export": "write the card of a run's model, and upload the model",
    },
    "serve": {"serve": "serve envs, rewards, a relay of weights, or a judge"},
    "operate": {
        "doctor": "check this machine, and a run",
        "plan": "predict the memory of a run without a GPU",
        "simulate": "predict other fleets and settings from a run's records",
        "launch": "start a run on Kubernetes, Slurm, SkyPilot or Ray",
        "scale": "change the number of actors on a host",
        "access": "let hosts join: a key, Redis users, the command",
    },
}


def run_name(text: str) -> str:
    """`text`, the name of a run. Raises ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty name; give that of a run, or leave the option out")
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"must be FIRST:LAST, as in 1:20, got {text!r}")
    return int(found[1]), int(found[2])


RUN = ("run.name", "run.root", "redis.url")
REWARDS = ("env.rewards", "env.mixture")
RELAY = (*RUN, "actors.join_timeout_s", "weights.host", "weights.key_file")
LEARNER = tuple(section.name for section in fields(Config) if section.name != "actors")
FIT = ("run", "model", "optim", "learner")
FIXED_MODEL = ("run", "model", "env", "sampling", "actors")


Arguments = dict[str, dict[str, Any]]  # of a verb by flag or name, as argparse takes them

FORCE: Arguments = {"--force": {"action": "store_true", "help": "overwrite FILE if it exists"}}
DRY_RUN = {"--dry-run": {"action": "store_true", "help": "print what would be started, and exit"}}
FILE: Arguments = {"path": {"metavar": "FILE", "help": "where to write the rows, .jsonl or .parquet"}}
FOLDER = {"folder": {"type": Path, "metavar": "FOLDER", "help": "of `slipstream fit prm` or `fit reward`"}}
RESUME = {
    "--resume": {"metavar": "NAME", "type": run_name, "help": "continue the run of this name with its configuration"}
}
TRACKERS: Arguments = {
    f"--{to}": {"action": "append_const", "const": to, "dest": "trackers", "help": f"also send the metrics to {name}"}
    for to, name in {"wandb": "Weights & Biases", "mlflow": "MLflow"}.items()
}
LAUNCH: Arguments = {
    "engine": {"choices": ("kubernetes", "ray", "skypilot", "slurm"), "help": "the system that starts the processes"},
    "--actor-hosts": {"type": int, "default": 2, "metavar": "N", "help": "hosts of actors (default: 2)"},
    **DRY_RUN,
}
SCALE: Arguments = {
    "--to": {"type": int, "metavar": "N", "help": "number of actors, with --host=ray of hosts (default: as advised)"},
    "--host": {"default": socket.gethostname(), "help": "the host (default: this one); `ray`: that of `launch ray`"},
}
ONCE = {"--once": {"action": "store_true", "help": "print the run as it is now, and exit"}}
ARCHIVE = {
    "--replay-archive": {
        "metavar": "RUN",
        "type": run_name,
        "help": "repeat the training of RUN from its archive and configuration, without actors or Redis; run.name is "
        "RUN-rerun by default",
    }
}
STREAM: Arguments = {
    "--stream": {"choices": ("train", "eval"), "default": "train", "help": "which groups (default: train)"}
}
JSON: Arguments = {"--json": {"action": "store_true", "dest": "as_json", "help": "print one JSON object per line"}}
LIMIT: Arguments = {"--limit": {"type": _count, "default": 50, "metavar": "N", "help": "list at most N (default: 50)"}}
STATE: Arguments = {
    "--state": {"choices": STATES, "metavar": "STATE", "help": f"only groups that are {', '.join(STATES)}"}
}
SELECTION: Arguments = {
    **STATE,
    "--steps": {"type": _steps, "metavar": "A:B", "help": "only what steps A to B were trained on, from the archive"},
    "--min-reward": {"type": float, "metavar": "R", "help": "only trajectories with a return of R or more"},
}
REASON: Arguments = {
    "--reason": {"required": True, "metavar": "WHY", "help": "why it is set aside; `replay quarantined` lists it"}
}


@dataclass(frozen=True, slots=True)
class Verb:
    function: str  # `module:name`, imported when the verb is called: `slipstream top` must not wait seconds for torch
    settings: tuple[str, ...]  # keys, and sections, that the verb reads itself or passes on
    options: Callable[[argparse.Namespace], dict[str, Any]] | None = None
    """The keyword arguments of the function; None: what `arguments`, `operands` and `of_runs` name, as they are."""
    summary: str = ""  # of a verb of two words; GROUPS has that of the others
    own: type | None = None  # the dataclass of the options that only this verb has; the function's argument `options`
    arguments: Arguments = field(default_factory=dict)  # of its own; those without a dash come first
    operands: str = ""  # numbers, which become `numbers`: those in [brackets] are optional, "..." is more of the last
    joins: bool = False  # about a run, by NAME or run.name: without a YAML file it uses the configuration of the run
    plays: bool = False  # with the run's trained model, not with its initial one
    of_runs: bool = False  # about one or several runs by NAME, which become `runs`: it looks them up itself
    loads_model: bool = False  # `model.path` may be a Hub id
    moves_weights: bool = False  # by `weights.key_file`, which must be readable
    has_stages: bool = False  # its file may name stages, which share the settings


def _question(
    function: str, summary: str, arguments: Arguments, *, operands: str = "", settings: tuple[str, ...] = RUN
) -> Verb:
    """The verb that asks one thing of a run's groups, by a `module:name` of tools/replay."""
    function = f"slipstream.tools.replay.{function}"
    return Verb(function, settings, summary=summary, arguments=arguments, operands=operands, joins=True)


VERBS = {
    **{
        f"init {kind}": Verb(
            "slipstream.tools.init.init:init",
            (),
            lambda given: {"kind": given.verb.split()[1], "name": given.name},
            f"write NAME.py, NAME.yaml and {third}: {what} of your own, which runs as it is",
            arguments={"name": {"metavar": "NAME", "help": "what Python may import"}},
        )
        for kind, third, what in (
            ("env", "test_NAME.py", "an environment"),
            ("agent", "NAME.jsonl", "an agent"),
            ("data", "NAME.jsonl", "a data set with a reward"),
        )
    },
    "up": Verb(
        "slipstream.tools.run.up:up",
        (*LEARNER, "actors"),
        lambda given: {"resume": bool(given.resume), "dry_run": given.dry_run, "trackers": given.trackers or []},
        loads_model=True,
        moves_weights=True,
        has_stages=True,
        arguments=RESUME | DRY_RUN | TRACKERS,
    ),
    "learner": Verb(
        "slipstream.tools.run.rerun_comparison:train_or_rerun",
        LEARNER,
        lambda _: {},
        joins=True,
        loads_model=True,
        moves_weights=True,
        arguments=ARCHIVE,
    ),
    "actors": Verb(
        "slipstream.tools.run.actor_host:host_actors", (*RELAY, *REWARDS, "actors"), joins=True, moves_weights=True
    ),
    **{
        f"fit {goal}": Verb(
            "slipstream.tools.cli.fit_verb:fit_model",
            FIT,
            lambda given: {"goal": given.verb.split()[1]},
            summary,
            FitOptions,
            loads_model=True,
        )
        for goal, summary in {
            "sft": "fine-tune model.path on the recorded conversations in --data, all of them or the best",
            "dpo": "train model.path on the pairs of preferred and rejected conversations in --data",
            "reward": "train a reward model, which begins as model.path, on the pairs of conversations in --data",
            "prm": "train a process reward model, which begins as model.path, on the labels of turns in --data",
        }.items()
    },
    "eval": Verb(
        "slipstream.tools.play.evaluate:evaluate",
        (*FIXED_MODEL, "eval.num_tasks", "learner.micro_batch_tokens"),
        own=EvalOptions,
        joins=True,
        plays=True,
        loads_model=True,
    ),
    "runs": Verb("slipstream.tools.see.runs:runs", ("run.root",)),
    "top": Verb("slipstream.tools.see.top:top", RUN, arguments=ONCE, joins=True),
    "view": Verb(
        "slipstream.tools.viewer.viewer:view",
        ("run.name", "run.root", "model.path"),
        own=ViewOptions,
        of_runs=True,
        arguments=FORCE,
    ),
    "replay audit": _question(
        "failure_table:audit", "recount every group and trajectory, and report what contradicts the ledger", {}
    ),
    "replay repair": _question(
        "group_edits:repair",
        "make a damaged ledger agree with what is stored again; unusable records are removed",
        STREAM | JSON,
    ),
    "replay groups": _question("groups:groups", "list the groups in Redis", STREAM | JSON | STATE | LIMIT),
    "replay show": _question(
        "show:show",
        "show the members of a group, or one trajectory turn by turn",
        STREAM | JSON,
        operands="GROUP [MEMBER]",
        settings=(*RUN, "model.path"),
    ),
    "replay quarantine": _question(
        "group_edits:quarantine",
        "take a group out of training, and keep it for inspection",
        STREAM | JSON | REASON,
        operands="GROUP",
    ),
    "replay requeue": _question(
        "group_edits:requeue",
        "queue groups again that are quarantined, ready, judging or leased; their trajectories are dropped",
        STREAM | JSON,
        operands="GROUP ...",
    ),
    "replay failures": _question(
        "failure_table:failures",
        "list the last attempts that failed because of an environment or the infrastructure",
        STREAM | JSON | LIMIT,
    ),
    "replay quarantined": _question(
        "failure_table:quarantined", "list the quarantined groups, with the reason and the actor", STREAM | JSON | LIMIT
    ),
    "replay export": _question(
        "trajectory_rows:export",
        "write trajectories to FILE.jsonl or FILE.parquet, with the columns that TRL reads",
        FILE | STREAM | SELECTION | FORCE,
        settings=(*RUN, "model.path"),
    ),
    "track": Verb("slipstream.tools.see.track.track:track", RUN, own=TrackOptions, joins=True),
    "collect": Verb(
        "slipstream.tools.play.collect:collect",
        (*FIXED_MODEL, "replay.group_size", "learner.micro_batch_tokens"),
        own=CollectOptions,
        arguments=FILE | FORCE,
        joins=True,
        plays=True,
        loads_model=True,
    ),
    "data": Verb("slipstream.tools.data.data:data", (), own=DataOptions, arguments=FILE | FORCE),
    "export": Verb("slipstream.tools.run.model_export:export", ("run.name", "run.root"), own=ExportOptions, joins=True),
    "serve envs": Verb(
        "slipstream.tools.serve.serve_envs:serve_envs",
        ("env.step_timeout_s",),
        summary="serve environments to actors on other hosts",
        own=EnvsOptions,
    ),
    "serve rewards": Verb(
        "slipstream.tools.serve.serve_rewards:serve_rewards",
        ("model", "learner.micro_batch_tokens"),
        summary="serve one copy of the reward model in FOLDER to collect, eval and actors; it scores in batches",
        own=RewardsOptions,
        arguments=FOLDER,
    ),
    "serve relay": Verb(
        "slipstream.actors.host.relay:relay",
        RELAY,
        summary="pull a run's newest weights once and serve them to its actors",
        joins=True,
        moves_weights=True,
    ),
    "serve judge": Verb(
        "slipstream.actors.host.judging:judge",
        (*RUN, "actors.join_timeout_s"),
        summary="compare the members of a run's complete groups, for judges in env.rewards with `compare`",
        joins=True,
    ),
    "doctor": Verb("slipstream.tools.run.doctor:doctor", (*RUN, *REWARDS), joins=True),
    "plan": Verb(
        "slipstream.tools.plan.plan:plan",
        ("model", "learner", "actors", "objective", "replay", *REWARDS),
        own=PlanOptions,
    ),
    "simulate": Verb(
        "slipstream.tools.simulate.simulate:simulate",
        (*RUN[:2], "run.seed", "replay", "actors.max_episodes", "actors.price_per_hour"),
        own=SimulateOptions,
        joins=True,
    ),
    "launch": Verb("slipstream.tools.launch.launch:launch", (*LEARNER, "actors"), arguments=LAUNCH),
    "scale": Verb("slipstream.tools.launch.scale:scale", (*RUN, "actors.count"), joins=True, arguments=SCALE),
    "access key": Verb(
        "slipstream.tools.access.key:make_key",
        ("weights.key_file",),
        summary="write a new key that encrypts weight transfers to weights.key_file, for networks that are not trusted",
    ),
    "access users": Verb(
        "slipstream.tools.access.access_users:users",
        ("run.name",),
        summary="print commands that create one Redis user per role: `slipstream access users NAME | redis-cli`",
        own=UsersOptions,
        of_runs=True,
    ),
    "access join": Verb(
        "slipstream.tools.access.join_command:join_command",
        (*RUN, "actors", "env.name", "weights.host", "weights.key_file"),
        summary="print the command that a new host of actors must be given; passwords and keys are not in it",
        own=FleetOption,
        joins=True,
    ),
}


def summary_of(name: str) -> str:
    """What the verb `name` does, in one line."""
    return VERBS[name].summary or next(group[name] for group in GROUPS.values() if name in group)


def called(arguments: argparse.Namespace) -> Callable[[Config], int]:
    """The function of the verb with its options; it takes the configuration and returns the exit code."""
    if arguments.road:
        if arguments.trackers:
            raise ConfigError(f"--{arguments.trackers[0]} is for one run; send a stage's by `slipstream track NAME`")
        road = resolve_name("slipstream.tools.road.road:road")
        return partial(road, path=arguments.road, settings=arguments.settings, dry_run=arguments.dry_run)
    verb = VERBS[arguments.verb]
    own: dict[str, Any] = {"options": options_of(verb.own, arguments)} if verb.own else {}
    named = verb.options(arguments) if verb.options else {name: getattr(arguments, name) for name in arguments.given}
    return partial(resolve_name(verb.function), **named, **own)
