"""`slipstream launch ENGINE`: start a run on Kubernetes, Slurm, SkyPilot or Ray. It prints its plan first."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import write_whole
from slipstream.tools.launch.kubernetes import manifest
from slipstream.tools.launch.launch_options import LaunchOptions
from slipstream.tools.launch.skypilot import actors_job, actors_task, launch_job, learner_task
from slipstream.tools.launch.slurm import actors_script, learner_script
from slipstream.tools.terminal.options import as_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The files to write into the run's folder under `launch/`, and the commands to run afterwards."""

    files: dict[str, str]
    commands: list[list[str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb to `parser`."""
    parser.add_argument("engine", choices=sorted(ENGINES), help="the system that starts the processes")
    parser.add_argument("--dry-run", action="store_true", help="print the files and the commands, and exit")


def launch(config: Config, *, engine: str, dry_run: bool, options: LaunchOptions) -> int:
    """Print the plan; unless `dry_run`, write its files and run its commands until one fails. Return the exit code."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name a server that every host can reach, as redis://host:6379")
    if config.learner.hosts > 1 and engine != "slurm":
        raise ConfigError(
            f"`learner.hosts` must be 1 on {engine}, got {config.learner.hosts}: only Slurm's scripts start a learner "
            "on several hosts; elsewhere start `slipstream learner` on each host (docs/running.md)"
        )
    _check_gpus(config, options)
    plan = ENGINES[engine](config, options)
    folder = _folder(config)
    for name, text in plan.files.items():
        print(f"--- {folder / name}\n{text}")
    for command in plan.commands:
        print(f"$ {shlex.join(command)}", flush=True)
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        write_whole(folder / name, text)
    for command in plan.commands:
        try:
            code = subprocess.run(command).returncode
        except FileNotFoundError:
            raise ConfigError(
                f"the command {command[0]} is not on this machine's PATH; install the client of {engine}"
            ) from None
        if code:
            return code
    return 0


def _check_gpus(config: Config, options: LaunchOptions) -> None:
    """Raise ConfigError for hosts without GPUs, or with too few for the learner's ranks.

    bfloat16 shows that the model is for GPUs. Options of sbatch may request them too.
    """
    if any(option.startswith(("--gpus", "--gres")) for option in options.sbatch.split()):
        return
    is_for_gpus, ranks = config.model.dtype == "bfloat16", config.learner.ranks_per_host
    auto = ", or set model.dtype=auto for hosts without GPUs"
    if options.learner_gpus < ranks and (is_for_gpus or options.learner_gpus):
        raise ConfigError(
            f"`--learner-gpus` must be at least {ranks}, one for each rank of the learner on its host, got "
            f"{options.learner_gpus}; add --learner-gpus={ranks}{auto if is_for_gpus else ''}"
        )
    if is_for_gpus and not options.actor_gpus:
        per_host = config.actors.count * config.actors.tensor_parallel
        raise ConfigError(
            f"`--actor-gpus` must be at least 1 where `model.dtype` is bfloat16, got 0; add --actor-gpus={per_host} "
            f"for actors.count={config.actors.count} on each host{auto}"
        )


def _folder(config: Config) -> Path:
    """In the current folder: the run's own folder may be on a volume that this machine does not mount."""
    return Path("launch").resolve() / config.run.name


def _kubernetes(config: Config, options: LaunchOptions) -> Plan:
    path = _folder(config) / "kubernetes.yaml"
    return Plan(files={path.name: manifest(config, options)}, commands=[["kubectl", "apply", "-f", str(path)]])


def _slurm(config: Config, options: LaunchOptions) -> Plan:
    folder = _folder(config)
    settings = folder / "config.yaml"
    scripts = {
        "learner.sbatch": learner_script(config, options, settings),
        "actors.sbatch": actors_script(config, options, settings),
    }
    commands = [["sbatch", str(folder / name)] for name in scripts]
    return Plan(files={settings.name: dump_config(config)} | scripts, commands=commands)


def _skypilot(config: Config, options: LaunchOptions) -> Plan:
    folder = _folder(config)
    settings = folder / "config.yaml"
    files = {
        settings.name: dump_config(config),
        "learner.yaml": learner_task(config, options, settings),
        "actors.yaml": actors_task(config, options, settings),
    }
    jobs = [launch_job(config, folder / "learner.yaml", f"{config.run.name}-learner")]
    jobs += [
        launch_job(config, folder / "actors.yaml", actors_job(config, number)) for number in range(options.actor_hosts)
    ]
    return Plan(files=files, commands=jobs)


def _ray(config: Config, options: LaunchOptions) -> Plan:
    path = _folder(config) / "config.yaml"
    return Plan(
        files={path.name: dump_config(config)},
        commands=[[sys.executable, "-P", "-m", "slipstream.tools.launch.ray_run", str(path), *as_arguments(options)]],
    )


ENGINES: dict[str, Callable[[Config, LaunchOptions], Plan]] = {
    "kubernetes": _kubernetes,
    "slurm": _slurm,
    "skypilot": _skypilot,
    "ray": _ray,
}
