"""The verbs of `slipstream`: what each does, the function that runs it, and the settings that it reads."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.config import Config
from learner.fit_options import FitOptions
from tools.acl_options import AclOptions, FleetOption
from tools.collect_options import CollectOptions
from tools.data_options import DataOptions
from tools.eval_options import EvalOptions
from tools.export_options import ExportOptions
from tools.launch.launch_options import LaunchOptions
from tools.launch.market_options import MarketOptions
from tools.options import options_of
from tools.plan.plan_options import PlanOptions
from tools.report.report_options import ReportOptions
from tools.rewards_options import RewardsOptions
from tools.serve_options import ServeOptions
from tools.simulate.simulate_options import SimulateOptions
from tools.top_options import TopOptions
from tools.track.track_options import TrackOptions
from tools.viewer.view_options import ViewOptions

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


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of the command line."""

    summary: str
    function: str  # `module:name`, imported when the verb is called: `slipstream top` must not wait seconds for torch
    settings: tuple[str, ...]  # keys, and sections, that the verb reads itself or passes on
    options: Callable[[argparse.Namespace], dict[str, Any]] = lambda _: {}  # keyword arguments of the function
    own: type | None = None  # the dataclass of the options that only this verb has; the function's argument `options`


VERBS = {
    "up": Verb(
        "start Redis, a learner, actors and TensorBoard on this machine, and supervise them",
        "tools.up:up",
        (*LEARNER, "actors"),
        lambda given: {"resume": bool(given.resume), "dry_run": given.dry_run},
    ),
    "learner": Verb(
        "train; one process, or one per rank under torchrun when learner.ranks > 1",
        "tools.rerun:train_or_rerun",
        LEARNER,
    ),
    "actors": Verb(
        "start actors.count actors that roll out episodes for a run",
        "tools.actor_host:host_actors",
        (*RELAY, *REWARDS, "actors", "weights.disk"),
    ),
    "judge": Verb(
        "compare the members of complete groups, for judges in env.rewards with `compare`",
        "actors.judge:judge",
        (*RUN, "actors.join_timeout_s"),
    ),
    "relay": Verb(
        "pull a run's newest weights once and serve them to its actors",
        "tools.relay:run_relay",
        RELAY,
    ),
    "runs": Verb("list the runs under run.root: state, steps, success, cost", "tools.runs:runs", ("run.root",)),
    "report": Verb(
        "write a page about RUN, or a comparison of several: `slipstream report RUN [RUN ...]`",
        "tools.report.report:report",
        ("run.name", "run.root"),
        lambda given: {"runs": given.runs},
        ReportOptions,
    ),
    "view": Verb(
        "look into the steps, groups and episodes of RUN in a browser: `slipstream view RUN`",
        "tools.viewer.viewer:view",
        ("run.name", "run.root", "model.path"),
        lambda given: {"runs": given.runs, "force": given.force},
        ViewOptions,
    ),
    "top": Verb("watch a run in the terminal", "tools.top:top", RUN, own=TopOptions),
    "track": Verb(
        "send a run's metrics to Weights & Biases, MLflow or Prometheus",
        "tools.track.track:track",
        RUN,
        own=TrackOptions,
    ),
    "simulate": Verb(
        "predict throughput, lag and cost of other fleets and settings, from the records of a run",
        "tools.simulate.simulate:simulate",
        (*RUN[:2], "replay", "actors.max_episodes", "actors.price_per_hour"),
        own=SimulateOptions,
    ),
    "scale": Verb(
        "keep the advised, or a given, number of actors running on a host; or hosts in the best markets for a budget",
        "tools.launch.scale:scale",
        (*RUN, "actors.count"),
        lambda given: {"to": given.to, "host": given.host, "on": given.on, "dry_run": given.dry_run},
        MarketOptions,
    ),
    "drill": Verb(
        "inject faults into a local run, one after another, and report what was lost",
        "tools.drill.drill:answer",
        (*LEARNER, "actors"),
        lambda given: {"asked": given},
    ),
    "launch": Verb(
        "start a run on Kubernetes, Slurm, SkyPilot or Ray",
        "tools.launch.launch:launch",
        (*LEARNER, "actors"),
        lambda given: {"engine": given.engine, "dry_run": given.dry_run},
        LaunchOptions,
    ),
    "replay": Verb(
        "inspect the buffer and the archive: groups, trajectories, steps; audit, repair, quarantine, export",
        "tools.replay.questions:ask",
        (*RUN, "model.path", "replay.lease_ttl_s", "replay.max_attempts", "replay.max_trajectory_bytes"),
        lambda given: {"arguments": given},
    ),
    "key": Verb(
        "write a new key that encrypts weight transfers to weights.key_file, for networks that are not trusted",
        "tools.key:make_key",
        ("weights.key_file",),
    ),
    "acl": Verb(
        "print commands that create one Redis user per role: `slipstream acl run.name=NAME | redis-cli`",
        "tools.acl:acl",
        ("run.name", "redis.url", "redis.shards"),
        own=AclOptions,
    ),
    "join-command": Verb(
        "print the command that a new host of actors must be given; passwords and keys are not in it",
        "tools.join_command:join_command",
        (*RUN, "actors", "env.name", "weights.host", "weights.key_file"),
        own=FleetOption,
    ),
    "sft": Verb(
        "fine-tune model.path on the recorded conversations in --data, all of them or the best",
        "tools.fit:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
    ),
    "dpo": Verb(
        "train model.path on the pairs of preferred and rejected conversations in --data (DPO)",
        "tools.fit:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
    ),
    "reward": Verb(
        "train a reward model, which begins as model.path, on the pairs of conversations in --data",
        "tools.fit:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
    ),
    "prm": Verb(
        "train a process reward model, which begins as model.path, on the labels of turns in --data",
        "tools.fit:fit_model",
        FIT,
        lambda given: {"goal": given.verb},
        FitOptions,
    ),
    "data": Verb(
        "filter, mark and split recorded conversations, and write FILE with a data card",
        "tools.data:data",
        (),
        lambda given: {"path": given.file, "force": given.force},
        DataOptions,
    ),
    "road": Verb(
        "run the stages of a file one after another, from a base model to an agent, with an evaluation after each",
        "tools.road:road",
        (*LEARNER, "actors"),
        lambda given: {"path": given.road, "overrides": given.settings, "dry_run": given.dry_run},
    ),
    "eval": Verb(
        "measure success on held-out tasks, with a run's trained model or model.path; compare formats of actions",
        "tools.evaluate:evaluate",
        (*FIXED_MODEL, "eval.num_tasks", "learner.micro_batch_tokens"),
        own=EvalOptions,
    ),
    "export": Verb(
        "write a model card into a run's trained model, and upload the folder to the Hugging Face Hub",
        "tools.export:export",
        ("run.name", "run.root"),
        own=ExportOptions,
    ),
    "collect": Verb(
        "play train tasks with a run's trained model or model.path, and write the trajectories to FILE",
        "tools.collect:collect",
        (*FIXED_MODEL, "replay.group_size", "learner.micro_batch_tokens"),
        lambda given: {"path": given.file, "force": given.force},
        CollectOptions,
    ),
    "envs": Verb(
        "serve environments to actors on other hosts: `slipstream envs serve`",
        "tools.serve_envs:serve_envs",
        ("env.step_timeout_s",),
        own=ServeOptions,
    ),
    "serve-rewards": Verb(
        "serve the reward model in FOLDER to collect, eval and actors, which then share one copy; it scores in batches",
        "tools.serve_rewards:serve_rewards",
        ("model", "learner.micro_batch_tokens"),
        lambda given: {"folder": given.folder},
        RewardsOptions,
    ),
    "plan": Verb(
        "print the memory that a run needs on GPUs and hosts, its speed and its cost; no GPU is needed",
        "tools.plan.plan:plan",
        ("model", "learner", "actors", "objective", "replay", "weights.anchor_every", *REWARDS),
        own=PlanOptions,
    ),
    "doctor": Verb(
        "check this machine: packages, Redis, memory, shared memory, GPU; and the run `run.name`, if it exists",
        "tools.doctor:doctor",
        (*RUN, *REWARDS),
    ),
}


def called(arguments: argparse.Namespace) -> Callable[[Config], int]:
    """The function of the verb with its options; it takes the configuration and returns the exit code."""
    verb = VERBS[arguments.verb]
    module, _, name = verb.function.partition(":")
    own: dict[str, Any] = {"options": options_of(verb.own, arguments)} if verb.own else {}
    return partial(getattr(importlib.import_module(module), name), **verb.options(arguments), **own)
