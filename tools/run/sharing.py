"""What learner and actors need under `slipstream up` where they share GPUs, unless the user has set it."""

from pathlib import Path

from slipstream.actors.engine.shadow_memory import GIB
from slipstream.common.config.config import Config
from slipstream.tools.plan.memory import kv_beside_learner
from slipstream.tools.plan.plan import measure
from slipstream.tools.run.check_input import check_model_config
from slipstream.tools.run.devices import memory_of, split_devices, visible_devices

TINY_KV_BYTES = GIB  # for the tiny model, which needs next to nothing


def share_gpus(config: Config) -> None:
    """Choose the actors' transport of weights and memory in `config`, and print both. Raises ConfigError."""
    shared = split_devices(config, visible_devices()).shared
    if not shared:
        return
    where, actors = f"learner and actors share GPU {', '.join(shared)}", config.actors
    if actors.transport == "broadcast":
        actors.transport = "pull"  # NCCL does not connect two processes on one GPU
        print(f"{where}: the actors pull weights (actors.transport=pull)")
    if not actors.limits_memory:
        actors.kv_cache_bytes = _planned(config, shared[0]) if config.model.path else TINY_KV_BYTES
        num_gib = actors.kv_cache_bytes / GIB
        print(f"{where}: {num_gib:.1f} GiB are for keys and values (actors.kv_cache_bytes={actors.kv_cache_bytes})")


def _planned(config: Config, device: str) -> int:
    gpu_bytes = memory_of(device)
    print("planning the memory that they share, by a step on a fake GPU; this takes up to a minute", flush=True)
    check_model_config(Path(config.model.path))
    return kv_beside_learner(config, measure(config), gpu_bytes=gpu_bytes)
