"""The root hash of a model's folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.actors.weights.staged_weights import ModelFolder
from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.model_folder import (
    SHAPES,
    ModelFile,
    OfferedFolder,
    blob_of,
    check_not_quantised,
    folder_root,
    has_weights,
    model_files,
    tensor_shapes,
)
from slipstream.learner.model.export import _write_files
from slipstream.learner.model.reward_model import _read_score
from slipstream.learner.rerun_check import difference
from slipstream.tools.run.check_input import check_model_folder

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.zeros(0)}


def saved(folder: Path, *files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt", "number": str(number)})
    return folder_root(folder)


def test_the_root_is_of_the_tensors_and_not_of_the_files(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", TENSORS)
    assert saved(tmp_path / "split", {name: TENSORS[name] for name in ("b", "empty")}, {"a": TENSORS["a"]}) == whole
    (tmp_path / "whole" / "config.json").write_text("{}")
    assert folder_root(tmp_path / "whole") == whole


@pytest.mark.parametrize(
    "changed",
    [
        {"a": TENSORS["a"].view(4, 3)},
        {"a": TENSORS["a"].view(torch.int32)},
        {"b": torch.tensor([1, 1, 1, 1, 1.0078125], dtype=torch.bfloat16)},
        {"c": torch.ones(1)},
    ],
    ids=["shape", "dtype", "last bit", "name"],
)
def test_any_change_of_a_tensor_changes_the_root(tmp_path: Path, changed: dict[str, torch.Tensor]) -> None:
    assert saved(tmp_path / "first", TENSORS) != saved(tmp_path / "second", TENSORS | changed)


def test_only_the_files_that_the_index_names_are_weights(tmp_path: Path) -> None:
    root = saved(tmp_path / "plain", TENSORS)
    folder = tmp_path / "indexed"
    saved(folder, TENSORS)
    save_file({"layers.0.wq": torch.ones(2)}, folder / "consolidated.safetensors")
    assert folder_root(folder) != root
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "model-0.safetensors")}))
    assert folder_root(folder) == root
    assert tensor_shapes(folder).keys() == TENSORS.keys()
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"names model-1\.safetensors, which .* does not have"):
        folder_root(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="not an index of safetensors files"):
        folder_root(folder)
    index.unlink()
    (folder / "model-0.safetensors").rename(folder / "model.safetensors")
    assert folder_root(folder) == root


@pytest.mark.parametrize("place", ["", "text_config"])
def test_quantised_weights_are_refused(place: str, tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps({place: quantised} if place else quantised))
    with pytest.raises(ConfigError, match=r"has quantised weights \(mxfp4\).*docs/models.md"):
        check_not_quantised(tmp_path)


def test_a_folder_without_weights_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        folder_root(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for a writer
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        folder_root(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        folder_root(tmp_path)


def header(entries: object, data: bytes = bytes(16)) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


GARBAGE = {
    "empty": b"",
    "shorter than a length": b"\x10",
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": header(b'{"a": '),
    "too deep": header(b"[" * 100_000),
    "an unknown dtype": header({"a": entry(dtype="F99")}),
    "another shape": header({"a": entry(shape=[5])}),
    "overlapping tensors": header({"a": entry(), "b": entry(data_offsets=[8, 24])}, bytes(24)),
    "cut short": header({"a": entry()}, bytes(15)),
    "bytes at the end": header({"a": entry()}, bytes(17)),
}
READERS: dict[str, Callable[[Path], object]] = {
    "the start of every verb": lambda folder: check_model_folder(folder, max_tokens=8),
    "a run's model files": lambda folder: model_files(folder, with_weights=True),
    "the shapes for other hosts": lambda folder: model_files(folder, with_weights=False),
    "the root of adapters": folder_root,
    "an engine": lambda folder: ModelFolder(folder, dtype=torch.float32, tied=False),
    "a reward model": _read_score,
    "a re-run": lambda folder: difference(folder, folder),
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", ["model.safetensors", "model-1.safetensors"])
def test_every_reader_refuses_damaged_weights_in_one_sentence(garbage: str, name: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", TENSORS)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / file).write_text("{}")
    file = tmp_path / "model" / name
    file.write_bytes(GARBAGE[garbage])
    assert not has_weights(file.parent)
    for reader, read in READERS.items():
        with pytest.raises(ConfigError, match=rf"^{file} is not a safetensors file: .*; download it again, or save it"):
            pytest.fail(f"{reader} read {read(file.parent)}")


@pytest.mark.parametrize("garbage", ["", "[]", '{"a": 4}', '{"a": [4', "\udcff"])
def test_shapes_that_are_damaged_are_refused(garbage: str, tmp_path: Path) -> None:
    (tmp_path / SHAPES).write_text(garbage, errors="surrogateescape")
    with pytest.raises(ConfigError, match=rf"{SHAPES} is damaged: .*; remove the folder, to pull it again"):
        tensor_shapes(tmp_path)


def test_a_link_out_of_the_folder_is_given_to_no_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "models--maker--name/snapshots/0123abcd"
    blobs = tmp_path / "models--maker--name/blobs"
    folder.parent.mkdir(parents=True)
    blobs.mkdir()
    saved(folder, TENSORS)
    (tmp_path / "passwd.json").write_text("secret")
    (blobs / "0a").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/0a")  # as the cache of Hugging Face has it
    (folder / "vocab.json").symlink_to("tokenizer.json")
    (folder / "config.json").symlink_to("../../../passwd.json")
    (folder / "merges.txt").symlink_to("/etc/hostname")
    (folder / "chain.json").symlink_to("config.json")
    offered = model_files(folder, with_weights=True)
    assert [file.name for file in offered] == ["model-0.safetensors", "tokenizer.json", "vocab.json"]
    assert f"{folder}/config.json is a link out of its folder, and is not given to others" in caplog.text
    plain = tmp_path / "plain"  # in a folder that is no cache, the folder above it is another's
    plain.mkdir()
    (plain / "a.json").write_text("{}")
    files = [ModelFile(name="a.json", blob=blob_of(plain / "a.json"))]
    (plain / "a.json").unlink()
    (plain / "a.json").symlink_to(tmp_path / "passwd.json")
    request = ChunkRequest(root=files[0].blob.root, offset=0, num_bytes=2)
    assert OfferedFolder(plain, files).read(request) is None
    exported = tmp_path / "exported"
    exported.mkdir()
    (folder / "chain.json").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("{}")
    _write_files(folder, exported)
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "tokenizer.json", "vocab.json"]
