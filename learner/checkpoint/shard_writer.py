"""Writes one rank's part of a checkpoint as a safetensors file, for `torch.distributed.checkpoint`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slipstream.common.process.output import sync_path


class ShardWriter(HuggingFaceStorageWriter):
    """PyTorch's writer of the same files, without its copy of them in memory.

    PyTorch's builds a whole file in memory first. That takes as much memory again as the state, and no other thread of
    the learner runs meanwhile: 0.6 s a GB, measured with safetensors 0.8. Its `save_file` does neither.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of `plan`; the file is on the disk when this returns."""
        written = Future[list[WriteResult]]()
        name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        if plan.items:
            self._write(Path(self.path) / name, plan, planner)
        written.set_result([_result(item, name) for item in plan.items])
        return written

    def _write(self, file: Path, plan: SavePlan, planner: SavePlanner) -> None:
        tensors, offsets = dict[str, torch.Tensor](), dict[str, dict[str, list[int]]]()
        for item in plan.items:
            assert item.tensor_data is not None  # the state has tensors only
            tensors[item.index.fqn] = planner.resolve_data(item).detach().cpu().contiguous()  # type: ignore[union-attr]
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        metadata = {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
        save_file(tensors, file, metadata=metadata)
        sync_path(file)


def _result(item: WriteItem, name: str) -> WriteResult:
    num_bytes = item.tensor_storage_size() or 0
    return WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=_StorageInfo(name, 0, num_bytes))
