"""`slipstream launch ENGINE`: a run on Kubernetes, Slurm, SkyPilot or Ray. Says what it will do before it does it."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.config import Config, dump_config
from common.config_error import ConfigError
from common.run_dir import write_whole
from tools.launch.kubernetes import manifest
from tools.launch.skypilot import actors_job, actors_task, launch_job, learner_task
from tools.launch.slurm import actors_script, learner_script


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is written into the run's folder below `launch/`, and run then."""

    files: dict[str, str]
    commands: list[list[str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the verb."""
    parser.add_argument("engine", choices=sorted(ENGINES), help="who starts the processes")
    parser.add_argument("--dry-run", action="store_true", help="print the files and the commands and stop")


def launch(config: Config, *, engine: str, dry_run: bool) -> int:
    """Print the plan; unless `dry_run`, write its files and run its commands until one fails. Return the exit code."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; it must be a server that every host reaches")
    plan = ENGINES[engine](config)
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
            raise ConfigError(f"{command[0]} is not on this machine's PATH; it comes with {engine}") from None
        if code:
            return code
    return 0


def _folder(config: Config) -> Path:
    """In the present folder: that of the run may be on hosts that do not exist yet."""
    return Path("launch").resolve() / config.run.name


def _kubernetes(config: Config) -> Plan:
    path = _folder(config) / "kubernetes.yaml"
    return Plan(files={path.name: manifest(config)}, commands=[["kubectl", "apply", "-f", str(path)]])


def _slurm(config: Config) -> Plan:
    folder = _folder(config)
    settings = folder / "config.yaml"
    scripts = {"learner.sbatch": learner_script(config, settings), "actors.sbatch": actors_script(config, settings)}
    commands = [["sbatch", str(folder / name)] for name in scripts]
    return Plan(files={settings.name: dump_config(config)} | scripts, commands=commands)


def _skypilot(config: Config) -> Plan:
    folder = _folder(config)
    settings = folder / "config.yaml"
    files = {
        settings.name: dump_config(config),
        "learner.yaml": learner_task(config, settings),
        "actors.yaml": actors_task(config, settings),
    }
    jobs = [launch_job(folder / "learner.yaml", f"{config.run.name}-learner")]
    jobs += [
        launch_job(folder / "actors.yaml", actors_job(config, number)) for number in range(config.launch.actor_hosts)
    ]
    return Plan(files=files, commands=jobs)


def _ray(config: Config) -> Plan:
    path = _folder(config) / "config.yaml"
    return Plan(files={path.name: dump_config(config)}, commands=[[sys.executable, "-m", "tools.launch.ray_run", str(path)]])


ENGINES: dict[str, Callable[[Config], Plan]] = {
    "kubernetes": _kubernetes,
    "slurm": _slurm,
    "skypilot": _skypilot,
    "ray": _ray,
}
