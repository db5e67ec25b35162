"""The tasks of a run on SkyPilot: managed jobs, which SkyPilot restarts elsewhere when their host is taken away.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from pathlib import Path
from typing import Any

import yaml

from common.config import Config
from common.config_error import ConfigError
from common.connection import PASSWORD_VARIABLE
from tools.launch.launch_options import LaunchOptions

SETTINGS = "~/slipstream.yaml"


def learner_task(config: Config, options: LaunchOptions, settings: Path) -> str:
    """The task of the learner, as YAML; `settings` is the configuration file on this machine."""
    return _task(config, options, "learner", settings, gpus=options.learner_gpus, use_spot=False)


def actors_task(config: Config, options: LaunchOptions, settings: Path) -> str:
    """The task of one host of actors, as YAML."""
    return _task(config, options, "actors", settings, gpus=options.actor_gpus, use_spot=not options.on_demand)


def actors_job(config: Config, number: int) -> str:
    """The name of the job of one host of actors."""
    return f"{config.run.name}-actors-{number}"


def launch_job(task: Path, name: str) -> list[str]:
    """The command that starts the task as the job `name`."""
    secret = ["--secret", PASSWORD_VARIABLE]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secret, "--name", name, str(task)]


def _task(config: Config, options: LaunchOptions, verb: str, settings: Path, *, gpus: int, use_spot: bool) -> str:
    if gpus and not options.gpu:
        raise ConfigError("`--gpu` is empty; name the kind of GPU that SkyPilot must find, as --gpu=H100")
    if not options.volume or not config.run.root.startswith("/"):
        raise ConfigError(
            f"got `--volume` {options.volume!r} and `run.root` {config.run.root!r}; SkyPilot needs a bucket as "
            "s3://NAME, and the absolute path to mount it at: the model and the run lie there"
        )
    resources: dict[str, Any] = {"cpus": f"{options.cpus}+", "memory": f"{options.memory_gib}+", "use_spot": use_spot}
    if options.infra:
        resources["infra"] = options.infra
    if gpus:
        resources["accelerators"] = f"{options.gpu}:{gpus}"
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    kind = " actors.instance_kind=spot" if use_spot else ""
    task = {
        "name": f"{config.run.name}-{verb}",
        "resources": resources,
        "secrets": {PASSWORD_VARIABLE: None},  # taken from the shell that launches, so that no file contains it
        "file_mounts": {
            SETTINGS: str(settings),
            config.run.root: {"source": options.volume, "mode": "MOUNT"},
        },
        "run": f"{options.setup}\nslipstream {verb} {SETTINGS} weights.host=$(hostname -I | cut -d' ' -f1){kind}\n",
    }
    return yaml.safe_dump(task, sort_keys=False)
