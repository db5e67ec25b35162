"""The root hash of a model's folder: folders with the same root hash have the same weights."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import xxhash

MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def folder_root(folder: Path) -> str:
    """xxh3-128 in hex over the name, dtype, shape and bytes of every tensor; their distribution over files is ignored.

    It reads every file: 0.1 s per GB if the disk is fast enough. Raises ValueError if there are no tensors.
    """
    tensors = dict(tensor for file in sorted(folder.glob("*.safetensors")) for tensor in _hashed(file))
    if not tensors:
        raise ValueError(f"`model.path` {folder} has no *.safetensors files; save the model with save_pretrained")
    return xxhash.xxh3_128_hexdigest(json.dumps(tensors, sort_keys=True).encode())


def _hashed(file: Path) -> Iterator[tuple[str, list[object]]]:
    """(name, [dtype, shape, hash]) of each tensor. https://github.com/huggingface/safetensors#format"""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        num_header_bytes = int.from_bytes(mapped[:8], "little")
        if num_header_bytes > min(MAX_HEADER_BYTES, len(mapped) - 8):
            raise ValueError(f"{file} is not a safetensors file: it declares a header of {num_header_bytes} bytes")
        header = json.loads(mapped[8 : 8 + num_header_bytes])
        begin = 8 + num_header_bytes
        with memoryview(mapped) as data:
            for name, tensor in header.items():
                if name != "__metadata__":
                    start, stop = tensor["data_offsets"]
                    with data[begin + start : begin + stop] as held:
                        yield name, [tensor["dtype"], tensor["shape"], xxhash.xxh3_64_intdigest(held)]
