"""Exports trained weights: a Hugging Face folder of the full weights, and adapters in peft's format."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from slipstream.common.config.replay_config import SamplingConfig
from slipstream.common.process.output import write_json, write_whole
from slipstream.common.transfer.model_folder import is_own
from slipstream.common.transfer.weights import TensorEntry
from slipstream.learner.model.folder_tensors import is_of_adapter
from slipstream.learner.model.lora import adapter_settings, name_in_peft
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.weight_shards import full_layout, full_tensors, named_shards, whole
from slipstream.learner.ranks.ranks import Ranks

MAX_FILE_BYTES = 5 << 30
_COPIED = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
# In the files of a folder: its weights are float32 now, and what only transformers 5 calls so.
_EDITS = (
    (r'("(?:torch_)?dtype"\s*:\s*)"\w+"', r'\1"float32"'),
    (r'"TokenizersBackend"', '"PreTrainedTokenizerFast"'),
    (r'"extra_special_tokens"(\s*:\s*\[)', r'"additional_special_tokens"\1'),
)


def save_hf(model: PackedModel, folder: Path, *, ranks: Ranks, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a Hugging Face folder that vLLM and transformers can load. Every rank calls it.

    The other files are those of `model.folder`, which every version of transformers reads as before. The weights are
    float32, with adapters merged. Only rank 0 writes: its memory holds the tensors of one file of at most
    `max_file_bytes`, or one tensor if that is larger. The other ranks need memory for one tensor.
    """
    tensors = full_tensors(model)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        # Of an earlier export, perhaps with other file sizes. Without its config.json no half of this one looks whole.
        for stale in (folder / "config.json", *folder.glob("model*.safetensors*")):
            stale.unlink(missing_ok=True)
        _write_weights(folder, tensors, _cut(full_layout(model), max_file_bytes))
        _write_files(model.folder, folder)
    for _ in tensors:  # gathering is collective
        pass


def write_sampling(model: PackedModel, folder: Path, sampling: SamplingConfig) -> None:
    """Write into an exported folder how training sampled: transformers and vLLM's server do the same by default.

    Of the first model's settings of generation only the special tokens stay: a penalty, say, would make another policy
    of the one that was trained and evaluated.
    """
    path = folder / "generation_config.json"
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


def save_adapters(model: PackedModel, folder: Path, *, ranks: Ranks) -> None:
    """Write only the adapters, in peft's format, for use with the weights of `model.folder`. Every rank calls it."""
    tensors = {name_in_peft(name): whole(shard).cpu() for name, shard in named_shards(model) if is_of_adapter(name)}
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _save(tensors.items(), folder / "adapter_model.safetensors")
        adapter_settings(model.causal_lm).save_pretrained(str(folder))


def _write_files(source: Path, folder: Path) -> None:
    """Copy what the folder `source` has beside its weights, byte for byte but for `_EDITS` and missing keys."""
    for path in source.iterdir():
        if path.name in ("config.json", "tokenizer_config.json"):
            text = path.read_text()
            for pattern, replacement in _EDITS:
                text = re.sub(pattern, replacement, text)
            write_whole(folder / path.name, _with_rope_keys(text))
        elif path.suffix in _COPIED and not path.name.endswith(".index.json") and is_own(path):
            shutil.copyfile(path, folder / path.name)


def _with_rope_keys(config: str) -> str:
    """The text of a config.json, also with the keys of rotary positions that transformers 4 reads, if it lacks them."""
    settings = json.loads(config)
    for part in (settings, settings.get("text_config") or {}):
        rope = part.get("rope_parameters") or {}
        if "rope_theta" in rope and "rope_theta" not in part:  # not of each kind of layer
            own = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            part |= own | {"rope_parameters": own | rope, "rope_scaling": rope if rope.keys() - {"rope_type"} else None}
            config = json.dumps(settings, indent=2) + "\n"
    return config


def _cut(entries: Sequence[TensorEntry], max_file_bytes: int) -> list[list[TensorEntry]]:
    """The tensors of each file, in their order."""
    files, room = [list[TensorEntry]()], max_file_bytes
    for entry in entries:
        if entry.num_bytes > room and files[-1]:
            files.append([])
            room = max_file_bytes
        files[-1].append(entry)
        room -= entry.num_bytes
    return files


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]], files: Sequence[list[TensorEntry]]) -> None:
    """Write the tensors of each file, and the index that transformers reads if there are several files."""
    if len(files) == 1:
        _save(tensors, folder / "model.safetensors")
        return
    weight_map = dict[str, str]()
    for number, entries in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _save(islice(tensors, len(entries)), folder / name)
        weight_map |= {entry.name: name for entry in entries}
    total_bytes = sum(entry.num_bytes for entries in files for entry in entries)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _save(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    weights = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it is no OSError, and does not name the file
        raise ValueError(
            f"cannot write {path}: {error}; free disk space or repair the disk, then start again"
        ) from error
