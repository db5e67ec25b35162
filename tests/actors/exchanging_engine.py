"""The engine process as on a GPU, with vLLM on a CPU: tensors keep their addresses, and a commit exchanges contents.

It differs from `actors/engine/serve_engine.py`, in all its workers, in this: linear layers multiply by their weights
and not by packed copies of them, as on a GPU; the memory is what SETTINGS says; and it writes to a log what a test
wants to know.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch.nn import functional
from vllm.model_executor.layers import utils

from slipstream.actors.engine import kept_shadow, serve_engine, staged_transfer, vllm_start
from slipstream.actors.engine.exchange import tensors_of

SETTINGS = "EXCHANGING_ENGINE"  # the environment variable
MODULE = "tests.actors.exchanging_engine"  # this module


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    log: str  # a file
    room_bytes: int  # that the engine left to a shadow
    free_bytes: int = 1 << 40
    packs: bool = False  # its kernels have attributes of their own, which each load replaces


def imitate(settings: Settings) -> None:
    for name in ("slipstream.actors.engine.kept_shadow", MODULE):
        logging.getLogger(name).addHandler(logging.FileHandler(settings.log))
    logging.getLogger().setLevel(logging.INFO)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear
        if settings.packs:
            layer.cpu_linear = lambda inputs, weight, bias: functional.linear(inputs, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    staged_transfer.keeps_addresses = lambda _: True
    kept_shadow.memory_of = lambda _: (settings.free_bytes, 1 << 40)
    vllm_start.shadow_room_bytes = lambda *_: settings.room_bytes
    vllm_start.WORKER_EXTENSION = f"{MODULE}.Worker"
    engine = staged_transfer.StagedTransferEngine
    engine.receive_weights = watched(engine.receive_weights)  # type: ignore[method-assign]


def watched(receive: Callable[..., None]) -> Callable[..., None]:
    """Log whether a commit has left the addresses of the model as they were."""

    def receive_weights(self: Any, info: Any) -> None:
        before = addresses(self.model)
        receive(self, info)
        same = before == addresses(self.model)
        logging.getLogger(MODULE).info("version %d: addresses %s", info.policy_version, "kept" if same else "changed")

    return receive_weights


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()}


class Worker(staged_transfer.StagingWorker):
    """Its import makes a worker in a process of its own one of an imitated GPU."""


if __name__ == MODULE and SETTINGS in os.environ:
    imitate(msgspec.json.decode(os.environ[SETTINGS], type=Settings))

if __name__ == "__main__":
    importlib.import_module(MODULE)  # as its workers import it
    serve_engine.main(Connection(int(sys.argv[1])))
    os._exit(0)
