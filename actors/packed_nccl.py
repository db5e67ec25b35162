"""Receives a broadcast's chunks over NCCL with vLLM's own packed NCCL engine, into a buffer where they are verified.

vLLM's engine passes unpacked weights to a model's `load_weights`, so that they serve before all have arrived. Here a
buffer takes the place of the model: no unverified byte reaches the model, and a transfer that fails leaves the old
weights unchanged. Its communicator is the broadcast's own group, whose members are agreed for each broadcast and whose
calls end by a deadline. vLLM's own communicator would wait for a dead peer for ever.
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from actors.broadcast import TimedGroup


class PackedNccl:
    """Receives flat buffers, chunk by chunk, through the device of one vLLM worker."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device

    def __call__(self, group: TimedGroup, buffer: torch.Tensor, chunk_bytes: int) -> None:
        """Receive into `buffer`, flat uint8 in host memory. Raises RuntimeError if the group fails or is too slow.

        For vLLM's engine each chunk is a tensor, whose name is its offset. The engine closes a packed buffer when it
        exceeds its limit, so with a limit of one byte less than a chunk, each chunk has a buffer of its own.
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
        # torch's current device is set per thread, and this is not the worker's main thread.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            engine.receive_weights(chunks)


class _Landing:
    """The stand-in for the model: writes each received chunk to its offset in the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def load_weights(self, chunks: list[tuple[str, torch.Tensor]]) -> None:
        for start, chunk in chunks:
            self._buffer[int(start) :][: chunk.numel()].copy_(chunk)
