"""The tasks of a run on SkyPilot: managed jobs, which SkyPilot starts again elsewhere when their host goes.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from pathlib import Path
from typing import Any

import yaml

from common.config import Config
from common.config_error import ConfigError
from common.connection import PASSWORD_VARIABLE

SETTINGS = "~/slipstream.yaml"


def learner_task(config: Config, settings: Path) -> str:
    """Trains; `settings` is the configuration on this machine."""
    return _task(config, "learner", settings, gpus=config.launch.learner_gpus, use_spot=False)


def actors_task(config: Config, settings: Path) -> str:
    """One host of actors."""
    return _task(config, "actors", settings, gpus=config.launch.actor_gpus, use_spot=config.launch.use_spot)


def actors_job(config: Config, number: int) -> str:
    """The name of a host of actors."""
    return f"{config.run.name}-actors-{number}"


def launch_job(task: Path, name: str) -> list[str]:
    """The command that starts the task as the job `name`."""
    secret = ["--secret", PASSWORD_VARIABLE]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secret, "--name", name, str(task)]


def _task(config: Config, verb: str, settings: Path, *, gpus: int, use_spot: bool) -> str:
    launch = config.launch
    if gpus and not launch.gpu:
        raise ConfigError("`launch.gpu` is empty; SkyPilot wants to know which kind, as launch.gpu=H100")
    if not launch.volume or not config.run.root.startswith("/"):
        raise ConfigError("SkyPilot needs `launch.volume`, a bucket as s3://NAME, and `run.root` as the absolute path "
                          "to mount it at: the model and the run's directory lie there")  # fmt: skip
    resources: dict[str, Any] = {"cpus": f"{launch.cpus}+", "memory": f"{launch.memory_gib}+", "use_spot": use_spot}
    if launch.infra:
        resources["infra"] = launch.infra
    if gpus:
        resources["accelerators"] = f"{launch.gpu}:{gpus}"
    if launch.image:
        resources["image_id"] = f"docker:{launch.image}"
    kind = " actors.instance_kind=spot" if use_spot else ""
    task = {
        "name": f"{config.run.name}-{verb}",
        "resources": resources,
        "secrets": {PASSWORD_VARIABLE: None},  # of the shell that launches; it stands in no file
        "file_mounts": {
            SETTINGS: str(settings),
            config.run.root: {"source": launch.volume, "mode": "MOUNT"},
        },
        "run": f"{launch.setup}\nslipstream {verb} {SETTINGS} weights.host=$(hostname -I | cut -d' ' -f1){kind}\n",
    }
    return yaml.safe_dump(task, sort_keys=False)
