"""Exports trained weights: a Hugging Face folder of the full weights, and adapters in peft's format."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from slipstream.common.config.replay_config import SamplingConfig
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.weights import TensorEntry
from slipstream.learner.model.folder_tensors import is_of_adapter
from slipstream.learner.model.lora import adapter_settings, name_in_peft
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.shards import full_layout, full_tensors, named_shards, whole
from slipstream.learner.ranks.ranks import Ranks

MAX_FILE_BYTES = 5 << 30
# Of a folder, if it has them: settings of generation, and how a vision-language model reads images.
COPIED = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def save_hf(model: PackedModel, folder: str | Path, *, ranks: Ranks, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a Hugging Face folder with the tokenizer, which vLLM and transformers can load. Every rank calls it.

    The weights are float32, with adapters merged. Only rank 0 writes: its memory holds the tensors of one file of at
    most `max_file_bytes`, or one tensor if that is larger. The other ranks need memory for one tensor.
    """
    folder, tensors = Path(folder), full_tensors(model)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("model*.safetensors*"):  # of an earlier export with other file sizes
            stale.unlink()
        _write_weights(folder, tensors, _cut(full_layout(model), max_file_bytes))
        model.causal_lm.config.save_pretrained(folder)
        load_tokenizer(model.folder).save_pretrained(folder)
        for name in COPIED:
            if (model.folder / name).is_file():
                shutil.copy(model.folder / name, folder)
    for _ in tensors:  # gathering is collective
        pass


def write_sampling(model: PackedModel, folder: str | Path, sampling: SamplingConfig) -> None:
    """Write into an exported folder how training sampled: transformers and vLLM's server do the same by default.

    Of the first model's settings of generation only the special tokens stay: a penalty, say, would make another policy
    of the one that was trained and evaluated.
    """
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        before = json.loads(path.read_text())
    else:
        before = GenerationConfig.from_model_config(model.causal_lm.config).to_dict()
    GenerationConfig(
        **{name: before.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,  # 0: off, for both
    ).save_pretrained(folder)


def save_adapters(model: PackedModel, folder: str | Path, *, ranks: Ranks) -> None:
    """Write only the adapters, in peft's format, for use with the weights of `model.folder`. Every rank calls it."""
    folder = Path(folder)
    tensors = {name_in_peft(name): whole(shard).cpu() for name, shard in named_shards(model) if is_of_adapter(name)}
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        adapter_settings(model.causal_lm).save_pretrained(str(folder))


def _cut(entries: Sequence[TensorEntry], max_file_bytes: int) -> list[int]:
    """The number of tensors in each file, in their order."""
    counts, room = [0], max_file_bytes
    for entry in entries:
        if entry.num_bytes > room and counts[-1]:
            counts.append(0)
            room = max_file_bytes
        counts[-1] += 1
        room -= entry.num_bytes
    return counts


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]], counts: Sequence[int]) -> None:
    """Write `counts` tensors into each file, and the index that transformers reads if there are several files."""
    if len(counts) == 1:
        _write_file(folder / "model.safetensors", tensors)
        return
    total_bytes, weight_map = 0, dict[str, str]()
    for number, count in enumerate(counts, start=1):
        name = f"model-{number:05d}-of-{len(counts):05d}.safetensors"
        written = _write_file(folder / name, islice(tensors, count))
        weight_map |= dict.fromkeys(written, name)
        total_bytes += sum(written.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Write one file; return the names of its tensors and their bytes."""
    weights = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(weights, path, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in weights.items()}
