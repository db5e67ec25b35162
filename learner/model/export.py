"""What leaves the learner: a Hugging Face folder of the whole weights, and adapters in peft's own format."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from common.weights import TensorEntry
from learner.model.lora import adapter_settings, is_of_adapter, name_in_peft
from learner.model.packed_model import PackedModel, full_layout, full_tensors, named_shards, whole
from learner.ranks import Ranks

MAX_FILE_BYTES = 5 << 30


def save_hf(model: PackedModel, folder: str | Path, *, ranks: Ranks, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a Hugging Face folder, tokenizer included, that vLLM and transformers load. Every rank calls it.

    The weights are float32, adapters merged. Rank 0 alone writes: it holds the tensors of one file of at most
    `max_file_bytes` at a time, or one tensor where that is larger; the others hold one tensor.
    """
    folder, tensors = Path(folder), full_tensors(model)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("model*.safetensors*"):  # of an export that was cut into other files
            stale.unlink()
        _write_weights(model, folder, tensors, _cut(full_layout(model), max_file_bytes))
        model.causal_lm.config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model.folder).save_pretrained(folder)
        generation = model.folder / "generation_config.json"
        if generation.is_file():
            shutil.copy(generation, folder)
    for _ in tensors:  # gathering is collective
        pass


def save_adapters(model: PackedModel, folder: str | Path, *, ranks: Ranks) -> None:
    """Write the adapters alone as peft does, to be put beside the weights of `model.folder`. Every rank calls it."""
    folder = Path(folder)
    tensors = {
        name_in_peft(name): whole(shard).cpu() for name, shard in named_shards(model) if is_of_adapter(name)
    }  # fmt: skip
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        adapter_settings(model.causal_lm).save_pretrained(str(folder))


def _cut(entries: Sequence[TensorEntry], max_file_bytes: int) -> list[int]:
    """How many of the tensors, in their order, each file gets."""
    counts, room = [0], max_file_bytes
    for entry in entries:
        if entry.num_bytes > room and counts[-1]:
            counts.append(0)
            room = max_file_bytes
        counts[-1] += 1
        room -= entry.num_bytes
    return counts


def _write_weights(
    model: PackedModel, folder: Path, tensors: Iterator[tuple[str, Tensor]], counts: Sequence[int]
) -> None:
    """Write so many of `tensors` into each file; where there are several, the index that transformers reads too."""
    if len(counts) == 1:
        _write_file(model, folder / "model.safetensors", tensors)
        return
    total_bytes, weight_map = 0, dict[str, str]()
    for number, count in enumerate(counts, start=1):
        name = f"model-{number:05d}-of-{len(counts):05d}.safetensors"
        written = _write_file(model, folder / name, islice(tensors, count))
        weight_map |= dict.fromkeys(written, name)
        total_bytes += sum(written.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_file(model: PackedModel, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return what was written: names and bytes."""
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    # A model may hold as one tensor what its folder has as several.
    held = revert_weight_conversion(model.causal_lm, held)
    save_file(held, path, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in held.items()}
