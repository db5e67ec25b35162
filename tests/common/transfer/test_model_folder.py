"""The root hash of a model's folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.model_folder import check_not_quantised, folder_root, tensor_shapes

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.zeros(0)}


def saved(folder: Path, *files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt", "number": str(number)})
    return folder_root(folder)


def test_the_root_is_of_the_tensors_and_not_of_the_files(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", TENSORS)
    rest = {name: TENSORS[name] for name in ("b", "empty")}
    assert saved(tmp_path / "split", rest, {"a": TENSORS["a"]}) == whole
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
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        folder_root(tmp_path)
