"""`slipstream launch ENGINE`: start a run on Kubernetes, Slurm, SkyPilot or Ray. It prints its plan first.

A run's files are made from templates: those in `templates/`, or the user's own copies in the folder `launch`.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import xxhash
import yaml

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.output import held, write_whole
from slipstream.common.process.shutdown import LEAVE_S
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.tools.access.join_command import host_settings

# In the current folder: the run's own folder may be on a volume that this machine does not mount.
OWN = Path("launch")
OURS = Path(__file__).parent / "templates"
TEMPLATES: dict[str, tuple[str, ...]] = {
    "kubernetes": ("kubernetes.yaml", "patch.yaml", "kustomization.yaml"),
    "slurm": ("learner.sbatch", "actors.sbatch"),
    "skypilot": ("learner.sky.yaml", "actors.sky.yaml"),
    "ray": (),
}
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
MAX_RUN_CHARS = 40  # of a resource's name on Kubernetes, which may have 63


def launch(config: Config, *, engine: str, actor_hosts: int, dry_run: bool) -> int:
    """Print the plan; unless `dry_run`, write its files and run its commands until one fails. Return the exit code."""
    _check(config, engine, actor_hosts)
    if not dry_run:
        _copy_templates(engine)
    folder = (OWN / config.run.name).resolve()
    files, commands = run_files(config, engine, folder, actor_hosts), run_commands(config, engine, folder, actor_hosts)
    for name, text in files.items():
        print(f"--- {folder / name}\n{text}")
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        for name, text in files.items():
            write_whole(folder / name, text)
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError("the package ray is not installed here; run pip install ray")
    for command in commands:
        try:
            code = subprocess.run(command).returncode
        except FileNotFoundError:
            raise ConfigError(
                f"the command {command[0]} is not on this machine's PATH; install the client of {engine}"
            ) from None
        if code:
            return code
    return 0


def run_files(config: Config, engine: str, folder: Path, actor_hosts: int) -> dict[str, str]:
    """The texts of the files in the run's folder under `launch`, by name. Raises ConfigError."""
    values = _values(config, folder, actor_hosts)
    return {"config.yaml": dump_config(config)} | {name: _filled(name, values) for name in TEMPLATES[engine]}


def run_commands(config: Config, engine: str, folder: Path, actor_hosts: int) -> list[list[str]]:
    """The commands that start the run from its files."""
    match engine:
        case "kubernetes":
            return [["kubectl", "apply", "-k", str(folder)]]
        case "slurm":
            return [["sbatch", str(folder / script)] for script in TEMPLATES[engine]]
        case "skypilot":  # the secrets are taken from the shell that launches, so that no file contains them
            secrets = ["--secret", PASSWORD_VARIABLE, *(["--secret", KEY_VARIABLE] if config.weights.key_file else [])]
            start = ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, "--name"]
            learner = [*start, f"{config.run.name}-learner", str(folder / "learner.sky.yaml")]
            actors = str(folder / "actors.sky.yaml")
            return [learner, *([*start, f"{config.run.name}-actors-{host}", actors] for host in range(actor_hosts))]
        case _:
            driver = [sys.executable, "-P", "-m", "slipstream.tools.launch.ray_run"]
            return [[*driver, str(folder / "config.yaml"), str(actor_hosts)]]


def _check(config: Config, engine: str, actor_hosts: int) -> None:
    require(actor_hosts >= 1, "--actor-hosts", ">= 1", actor_hosts, "leave it out for the default")
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name a server that every host can reach, as redis://host:6379")
    if config.learner.hosts > 1 and engine != "slurm":
        raise ConfigError(
            f"`learner.hosts` must be 1 on {engine}, got {config.learner.hosts}: only Slurm's scripts start a learner "
            "on several hosts; elsewhere start `slipstream learner` on each host (docs/running.md)"
        )
    if engine in ("kubernetes", "skypilot") and not config.run.root.startswith("/"):
        raise ConfigError(
            f"`run.root` must be an absolute path on {engine}, got {config.run.root!r}; the learner's volume is "
            "mounted there, as the run and its checkpoints are in it"
        )


def _copy_templates(engine: str) -> None:
    """Copy missing templates to the user's folder. Raises ConfigError if there were any: none suits every cluster."""
    missing = [OWN / name for name in TEMPLATES[engine] if not (OWN / name).exists()]
    OWN.mkdir(exist_ok=True)
    for path in missing:
        shutil.copyfile(OURS / path.name, path)
    if missing:
        raise ConfigError(
            f"wrote {' and '.join(map(str, missing))}: the files of a run are made from them; edit what differs on "
            "your cluster, then launch again"
        )


def _filled(name: str, values: Mapping[str, str]) -> str:
    """The text of a template with `values`. A line whose value is empty is left out. Raises ConfigError."""
    path = OWN / name if (OWN / name).exists() else OURS / name
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not in UTF-8: {error}; save it in UTF-8") from None
    if unknown := set(PLACEHOLDER.findall("".join(lines))) - values.keys():
        raise ConfigError(
            f"{path} has {{{{{min(unknown)}}}}}, which is no value of a run; write the value itself, or use one of "
            f"{', '.join(sorted(values))}"
        )
    kept = [line for line in lines if all(values[used] for used in PLACEHOLDER.findall(line))]
    return PLACEHOLDER.sub(lambda match: values[match[1]], "".join(kept))


def _values(config: Config, folder: Path, actor_hosts: int) -> dict[str, str]:
    """The values of the templates' placeholders, quoted for where they stand: in YAML, in a script, or in both."""
    settings = host_settings(config, transport=config.actors.transport, redis_url=config.redis.url)
    words = shlex.join(settings)
    require(words.isprintable(), "actors", "printable text on one line", words, "correct the setting")
    return {
        "run": config.run.name,
        "resource": resource_name(config.run.name),
        "folder": shlex.quote(str(folder)),
        "learner_hosts": str(config.learner.hosts),
        "learner_gpus": str(gpus_of_learner(config) or ""),
        "actor_hosts": str(actor_hosts),
        "actor_gpus": str(gpus_of_actors(config) or ""),
        "actor_settings": words,
        "actor_settings_as_yaml": _as_yaml(settings),
        "actor_grace_s": str(round(config.actors.drain_s + LEAVE_S) + 5),
        "config_as_yaml": _as_yaml(dump_config(config)),
        "config_file_as_yaml": _as_yaml(str(folder / "config.yaml")),
        "root_as_yaml": _as_yaml(config.run.root),
        "key_variable": KEY_VARIABLE if config.weights.key_file else "",
    }


def _as_yaml(value: str | list[str]) -> str:
    """`value` on one line of YAML, quoted."""
    return yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf).strip()


def gpus_of_learner(config: Config) -> int:
    """The GPUs of each of the learner's hosts: one for each rank there, if the model is for GPUs."""
    return config.learner.ranks_per_host if config.model.dtype == "bfloat16" else 0


def gpus_of_actors(config: Config) -> int:
    """The GPUs of each host of actors, if the model is for GPUs."""
    return max(config.actors.count, 1) * config.actors.tensor_parallel if config.model.dtype == "bfloat16" else 0


def resource_name(run: str) -> str:
    """A valid name on Kubernetes, of this run alone; a part such as `-learner` may follow."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:MAX_RUN_CHARS].strip("-")
    if name != run:  # other names may give the same
        digest = xxhash.xxh32_hexdigest(run.encode())
        name = f"{name[: MAX_RUN_CHARS - len(digest) - 1].strip('-')}-{digest}".strip("-")
    return f"slipstream-{name}"
