"""The verbs of `slipstream`: what each does, the function that runs it, and the settings that it reads."""

import argparse
import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.plan.plan_options import PlanOptions
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.rewards_options import RewardsOptions
from slipstream.tools.play.serve_options import ServeOptions
from slipstream.tools.run.acl_options import AclOptions, FleetOption
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.export_options import ExportOptions
from slipstream.tools.see.top_options import TopOptions
from slipstream.tools.see.track.track_options import TrackOptions
from slipstream.tools.simulate.simulate_options import SimulateOptions
from slipstream.tools.terminal.options import options_of
from slipstream.tools.viewer.view_options import ReportOptions, ViewOptions


def run_name(text: str) -> str:
    """`text`, the name of a run. Raises ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty name; give that of a run, or leave the option out")
    return text


RUN = ("run.name", "run.root", "redis.url")
REWARDS = ("env.rewards", "env.mixture")
RELAY = (
    *RUN,
    "actors.join_timeout_s",
    "weights.host",
    "weights.fan_out",
    "weights.pull_bytes_per_s",
    "weights.key_file",
)
LEARNER = (
    "run",
    "model",
    "redis",
    "env",
    "sampling",
    "replay",
    "objective",
    "optim",
    "learner",
    "warm_start",
    "eval",
    "weights",
)
FIT = ("run", "model", "optim", "learner")
FIXED_MODEL = ("run", "model", "env", "sampling", "actors")


# Arguments of verbs, by flag or name, as argparse takes them.
FORCE = {"--force": {"action": "store_true", "help": "overwrite FILE if it exists"}}
DRY_RUN = {"--dry-run": {"action": "store_true", "help": "print what would be started, and exit"}}
FILE = {"file": {"type": Path, "metavar": "FILE", "help": "where to write the rows, .jsonl or .parquet"}}
FOLDER = {"folder": {"type": Path, "metavar": "FOLDER", "help": "of `slipstream prm` or `slipstream reward`"}}
ROAD = {"road": {"metavar": "road.yaml", "help": "the stages: see docs/road.md"}}
SERVE = {"service": {"choices": ("serve",), "help": "what to do with the environments"}}
LAUNCH: dict[str, dict[str, Any]] = {
    "engine": {"choices": ("kubernetes", "ray", "skypilot", "slurm"), "help": "the system that starts the processes"},
    "--actor-hosts": {"type": int, "default": 2, "metavar": "N", "help": "hosts of actors (default: 2)"},
    **DRY_RUN,
}
SCALE: dict[str, dict[str, Any]] = {
    "--to": {"type": int, "metavar": "N", "help": "number of actors, with --host=ray of hosts (default: as advised)"},
    "--host": {"default": socket.gethostname(), "help": "the host (default: this one); `ray`: that of `launch ray`"},
}
ARCHIVE = {
    "--replay-archive": {
        "metavar": "RUN",
        "type": run_name,
        "help": "repeat the training of RUN from its archive and configuration, without actors or Redis; run.name is "
        "RUN-rerun by default",
    }
}


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of the command line."""

    summary: str
    function: str  # `module:name`, imported when the verb is called: `slipstream top` must not wait seconds for torch
    settings: tuple[str, ...]  # keys, and sections, that the verb reads itself or passes on
    options: Callable[[argparse.Namespace], dict[str, Any]] = lambda _: {}  # keyword arguments of the function
    own: type | None = None  # the dataclass of the options that only this verb has; the function's argument `options`
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its own; those without a dash come first
    adds: str = ""  # `module:name` of a function that adds more of them
    asks: bool = False  # its first argument is one of the questions in tools/replay/questions.py
    joins: bool = False  # about a run that exists: without a YAML file it uses the configuration in the run's directory
    plays: bool = False  # with the run's trained model, not with its initial one
    of_runs: bool = False  # reads directories of runs, which are named without `run.name=`
    loads_model: bool = False  # `model.path` may be a Hub id
    moves_weights: bool = False  # by `weights.key_file`, which must be readable
    has_stages: bool = False  # its file names stages, which share the settings


VERBS = {
    "up": Verb(
        "start Redis, a learner, actors and TensorBoard on this machine, and supervise them",
        "slipstream.tools.run.up:up",
        (*LEARNER, "actors"),
        lambda given: {"resume": bool(given.resume), "dry_run": given.dry_run},
        loads_model=True,
        moves_weights=True,
        arguments=DRY_RUN,
    ),
    "learner": Verb(
        "train; one process, or one per rank under torchrun when learner.ranks > 1",
        "slipstream.tools.run.rerun_comparison:train_or_rerun",
        LEARNER,
        joins=True,
        loads_model=True,
        moves_weights=True,
        arguments=ARCHIVE,
    ),
    "actors": Verb(
        "start actors.count actors that roll out episodes for a run",
        "slipstream.tools.run.actor_host:host_actors",
        (*RELAY, *REWARDS, "actors", "weights.disk"),
        joins=True,
        moves_weights=True,
    ),
    "judge": Verb(
        "compare the members of complete groups, for judges in env.rewards with `compare`",
        "slipstream.actors.host.judging:judge",
        (*RUN, "actors.join_timeout_s"),
        joins=True,
    ),
    "relay": Verb(
        "pull a run's newest weights once and serve them to its actors",
        "slipstream.tools.run.relay_verb:run_relay",
        RELAY,
        joins=True,
        moves_weights=True,
    ),
    "runs": Verb(
        "list the runs under run.root: state, steps, success, cost", "slipstream.tools.see.runs:runs", ("run.root",)
    ),
    "report": Verb(
        "write a page about RUN, or a comparison of several: `slipstream report RUN [RUN ...]`",
        "slipstream.tools.viewer.viewer:report",
        ("run.name", "run.root", "model.path"),
        lambda given: {"runs": given.runs, "force": given.force},
        ReportOptions,
        of_runs=True,
        arguments=FORCE,
    ),
    "view": Verb(
        "show the report, the steps, groups and episodes of RUN in a browser: `slipstream view RUN`",
        "slipstream.tools.viewer.viewer:view",
        ("run.name", "run.root", "model.path"),
        lambda given: {"runs": given.runs},
        ViewOptions,
        of_runs=True,
    ),
    "top": Verb("watch a run in the terminal", "slipstream.tools.see.top:top", RUN, own=TopOptions, joins=True),
    "track": Verb(
        "send a run's metrics to Weights & Biases, MLflow or Prometheus",
        "slipstream.tools.see.track.track:track",
        RUN,
        own=TrackOptions,
        joins=True,
    ),
    "simulate": Verb(
        "predict throughput, lag and cost of other fleets and settings, from the records of a run",
        "slipstream.tools.simulate.simulate:simulate",
        (*RUN[:2], "replay", "actors.max_episodes", "actors.price_per_hour"),
        own=SimulateOptions,
        joins=True,
    ),
    "scale": Verb(
        "keep the advised, or a given, number of actors running on a host",
        "slipstream.tools.launch.scale:scale",
        (*RUN, "actors.count"),
        lambda given: {"to": given.to, "host": given.host},
        joins=True,
        arguments=SCALE,
    ),
    "drill": Verb(
        "inject faults into a local run, one after another, and report what was lost",
        "slipstream.tools.drill.drill:answer",
        (*LEARNER, "actors"),
        lambda given: {"asked": given},
        adds="slipstream.tools.drill.drill:add_options",
    ),
    "launch": Verb(
        "start a run on Kubernetes, Slurm, SkyPilot or Ray",
        "slipstream.tools.launch.launch:launch",
        (*LEARNER, "actors"),
        lambda given: {"engine": given.engine, "actor_hosts": given.actor_hosts, "dry_run": given.dry_run},
        arguments=LAUNCH,
    ),
    "replay": Verb(
        "inspect the buffer and the archive: groups, trajectories, steps; audit, repair, quarantine, export",
        "slipstream.tools.replay.questions:ask",
        (*RUN, "model.path", "replay.lease_ttl_s", "replay.max_attempts", "replay.max_trajectory_bytes"),
        lambda given: {"arguments": given},
        joins=True,
        asks=True,
    ),
    "key": Verb(
        "write a new key that encrypts weight transfers to weights.key_file, for networks that are not trusted",
        "slipstream.tools.run.key:make_key",
        ("weights.key_file",),
    ),
    "acl": Verb(
        "print commands that create one Redis user per role: `slipstream acl run.name=NAME | redis-cli`",
        "slipstream.tools.run.acl:acl",
        ("run.name", "redis.url", "redis.shards"),
        own=AclOptions,
    ),
    "join-command": Verb(
        "print the command that a new host of actors must be given; passwords and keys are not in it",
        "slipstream.tools.run.join_command:join_command",
        (*RUN, "actors", "env.name", "weights.host", "weights.key_file"),
        own=FleetOption,
        joins=True,
    ),
    "sft": Verb(
        "fine-tune model.path on the recorded conversations in --data, all of them or the best",
        "slipstream.tools.cli.fit_verb:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
        loads_model=True,
    ),
    "dpo": Verb(
        "train model.path on the pairs of preferred and rejected conversations in --data (DPO)",
        "slipstream.tools.cli.fit_verb:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
        loads_model=True,
    ),
    "reward": Verb(
        "train a reward model, which begins as model.path, on the pairs of conversations in --data",
        "slipstream.tools.cli.fit_verb:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
        loads_model=True,
    ),
    "prm": Verb(
        "train a process reward model, which begins as model.path, on the labels of turns in --data",
        "slipstream.tools.cli.fit_verb:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
        loads_model=True,
    ),
    "data": Verb(
        "filter, mark and split recorded conversations, and write FILE with a data card",
        "slipstream.tools.data.data:data",
        (),
        lambda given: {"path": given.file, "force": given.force},
        DataOptions,
        arguments=FILE | FORCE,
    ),
    "road": Verb(
        "run the stages of a file one after another, from a base model to an agent, with an evaluation after each",
        "slipstream.tools.road.road:road",
        (*LEARNER, "actors"),
        lambda given: {"path": given.road, "settings": given.settings, "dry_run": given.dry_run},
        arguments=ROAD | DRY_RUN,
        loads_model=True,
        has_stages=True,
    ),
    "eval": Verb(
        "measure success on held-out tasks, with a run's trained model or model.path; compare formats of actions",
        "slipstream.tools.play.evaluate:evaluate",
        (*FIXED_MODEL, "eval.num_tasks", "learner.micro_batch_tokens"),
        own=EvalOptions,
        joins=True,
        plays=True,
        loads_model=True,
    ),
    "export": Verb(
        "write a model card into a run's trained model, and upload the folder to the Hugging Face Hub",
        "slipstream.tools.run.model_export:export",
        ("run.name", "run.root"),
        own=ExportOptions,
        joins=True,
    ),
    "collect": Verb(
        "play train tasks with a run's trained model or model.path, and write the trajectories to FILE",
        "slipstream.tools.play.collect:collect",
        (*FIXED_MODEL, "replay.group_size", "learner.micro_batch_tokens"),
        lambda given: {"path": given.file, "force": given.force},
        CollectOptions,
        arguments=FILE | FORCE,
        joins=True,
        plays=True,
        loads_model=True,
    ),
    "envs": Verb(
        "serve environments to actors on other hosts: `slipstream envs serve`",
        "slipstream.tools.play.serve_envs:serve_envs",
        ("env.step_timeout_s",),
        own=ServeOptions,
        arguments=SERVE,
    ),
    "serve-rewards": Verb(
        "serve the reward model in FOLDER to collect, eval and actors, which then share one copy; it scores in batches",
        "slipstream.tools.play.serve_rewards:serve_rewards",
        ("model", "learner.micro_batch_tokens"),
        lambda given: {"folder": given.folder},
        RewardsOptions,
        arguments=FOLDER,
    ),
    "plan": Verb(
        "print the memory that a run needs on GPUs and hosts, its speed and its cost; no GPU is needed",
        "slipstream.tools.plan.plan:plan",
        ("model", "learner", "actors", "objective", "replay", "weights.anchor_every", *REWARDS),
        own=PlanOptions,
    ),
    "doctor": Verb(
        "check this machine: packages, Redis, memory, shared memory, GPU; and the run `run.name`, if it exists",
        "slipstream.tools.run.doctor:doctor",
        (*RUN, *REWARDS),
        joins=True,
    ),
}


def placed(place: str) -> Callable[..., Any]:
    """Import and return `module:name`."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def called(arguments: argparse.Namespace) -> Callable[[Config], int]:
    """The function of the verb with its options; it takes the configuration and returns the exit code."""
    verb = VERBS[arguments.verb]
    own: dict[str, Any] = {"options": options_of(verb.own, arguments)} if verb.own else {}
    return partial(placed(verb.function), **verb.options(arguments), **own)
