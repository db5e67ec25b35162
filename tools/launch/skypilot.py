"""The tasks of a run on SkyPilot: managed jobs, which SkyPilot restarts elsewhere when their host is taken away.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

import shlex
from pathlib import Path
from typing import Any

import yaml

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.transfer.curve import KEY_VARIABLE
from slipstream.tools.launch.launch_options import LaunchOptions
from slipstream.tools.run.host_command import host_settings

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


def launch_job(config: Config, task: Path, name: str) -> list[str]:
    """The command that starts the task as the job `name`."""
    secrets = [word for variable in _secrets(config) for word in ("--secret", variable)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, "--name", name, str(task)]


def _secrets(config: Config) -> list[str]:
    """The variables that are taken from the shell that launches, so that no file contains them."""
    return [PASSWORD_VARIABLE, *([KEY_VARIABLE] if config.weights.key_file else [])]


def _task(config: Config, options: LaunchOptions, verb: str, settings: Path, *, gpus: int, use_spot: bool) -> str:
    if gpus and not options.gpu:
        raise ConfigError("`--gpu` is empty; name the kind of GPU that SkyPilot must find, as --gpu=H100")
    resources: dict[str, Any] = {"cpus": f"{options.cpus}+", "memory": f"{options.memory_gib}+", "use_spot": use_spot}
    if options.infra:
        resources["infra"] = options.infra
    if gpus:
        resources["accelerators"] = f"{options.gpu}:{gpus}"
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    kind = " actors.instance_kind=spot" if use_spot else ""
    transport, url = config.actors.transport, config.redis.url
    own = shlex.join(host_settings(config, transport=transport, redis_url=url)) if verb == "actors" else SETTINGS
    task = {
        "name": f"{config.run.name}-{verb}",
        "resources": resources,
        "secrets": dict.fromkeys(_secrets(config)),
        **({"file_mounts": _learners_files(config, options, settings)} if verb == "learner" else {}),
        "run": f"{options.setup}\nslipstream {verb} {own} weights.host=$(hostname -I | cut -d' ' -f1){kind}\n",
    }
    return yaml.safe_dump(task, sort_keys=False)


def _learners_files(config: Config, options: LaunchOptions, settings: Path) -> dict[str, Any]:
    if not options.volume or not config.run.root.startswith("/"):
        raise ConfigError(
            f"got `--volume` {options.volume!r} and `run.root` {config.run.root!r}; the learner needs a bucket as "
            "s3://NAME, and the absolute path to mount it at: the run and its checkpoints are there"
        )
    return {SETTINGS: str(settings), config.run.root: {"source": options.volume, "mode": "MOUNT"}}
