"""A broadcast's chunks over NCCL, received by vLLM's own packed NCCL engine, and landed where they are verified.

That engine hands what it has unpacked to a model's `load_weights`, so that weights would serve while they come. Here a
buffer stands in the model's place: an unverified byte never reaches the model, and what breaks half-way leaves the old
weights as they were. Its communicator is the broadcast's own group, whose members are agreed on anew for every version
and whose calls end by a deadline; one of vLLM's would wait for a dead peer for ever.
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from actors.broadcast import TimedGroup


class PackedNccl:
    """Receives flat buffers, chunk by chunk, over the device of one vLLM worker."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device

    def __call__(self, group: TimedGroup, buffer: torch.Tensor, chunk_bytes: int) -> None:
        """Fill `buffer`, flat and uint8 in host memory. Raises RuntimeError where the group breaks or is late.

        To vLLM's engine a chunk is a tensor that is named by where it begins, and as a packed buffer is full once it is
        larger than its limit, each fills one.
        """
        config = WeightTransferConfig(backend="nccl")
        engine = NCCLWeightTransferEngine(config, self._vllm_config, self._device, _Landing(buffer))
        engine.packed, engine.packed_buffer_size_bytes = True, chunk_bytes - 1
        engine.model_update_group = group
        starts = range(0, buffer.numel(), chunk_bytes)
        sizes = [min(chunk_bytes, buffer.numel() - start) for start in starts]
        chunks = NCCLWeightTransferUpdateInfo(
            names=[str(start) for start in starts],
            dtype_names=["uint8"] * len(sizes),
            shapes=[[size] for size in sizes],
        )
        # The current device is a thread's own, and this one is not the worker's.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            engine.receive_weights(chunks)


class _Landing:
    """What the engine takes for a model."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def load_weights(self, chunks: list[tuple[str, torch.Tensor]]) -> None:
        for start, chunk in chunks:
            self._buffer[int(start) :][: chunk.numel()].copy_(chunk)
