"""What learner and actors need under `slipstream up` where they share GPUs, unless the user has set it."""

import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream.actors.engine.shadow_memory import GIB
from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.devices import memory_of, split_devices, visible_devices

PLAN = "slipstream.tools.plan.kv_room"  # in a process of its own, as it imports torch
TINY_KV_BYTES = GIB  # for the tiny model, which needs next to nothing


def share_gpus(config: Config) -> None:
    """Choose the transport of weights and the memory of the actors in `config`, and print both.

    NCCL does not connect two processes on one GPU, so the actors pull. Raises ConfigError if the two do not fit.
    """
    shared = split_devices(config, visible_devices()).shared
    if not shared:
        return
    where, actors = f"learner and actors share GPU {', '.join(shared)}", config.actors
    if actors.transport == "broadcast":
        actors.transport = "pull"
        print(f"{where}: the actors pull weights (actors.transport=pull)")
    if not actors.limits_memory:
        actors.kv_cache_bytes = _planned(config, shared[0]) if config.model.path else TINY_KV_BYTES
        num_gib = actors.kv_cache_bytes / GIB
        print(f"{where}: {num_gib:.1f} GiB are for keys and values (actors.kv_cache_bytes={actors.kv_cache_bytes})")


def _planned(config: Config, device: str) -> int:
    gpu_bytes = memory_of(device)
    print("planning the memory that they share, by a step on a fake GPU; this takes up to a minute", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config))
        command = [sys.executable, "-P", "-m", PLAN, str(path), str(gpu_bytes)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(done.stderr.strip()[-2000:])
    return int(done.stdout)
