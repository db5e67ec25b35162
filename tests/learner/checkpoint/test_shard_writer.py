"""One rank's file of a checkpoint."""

import tracemalloc
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from slipstream.learner.checkpoint.shard_writer import ShardWriter
from slipstream.learner.ranks.ranks import Ranks

MIB = 1 << 20


def test_a_shard_is_written_without_a_copy_of_it_in_memory_and_read_back(tmp_path: Path, ranks: Ranks) -> None:
    wide = torch.randn(2048, 4096)  # 32 MiB
    state = {"wide": wide, "half_of_it": wide[:, :2048], "step": torch.tensor(7), "half": torch.ones(3).bfloat16()}
    tracemalloc.start()
    state_dict_saver.save(state, storage_writer=ShardWriter(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB

    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    state_dict_loader.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
