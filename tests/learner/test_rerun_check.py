"""Two trained models are the same when all of their bits are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.common.config.config import Config
from slipstream.learner.checkpoint.conditions import differences, settings_of
from slipstream.learner.rerun_check import difference

TENSORS = {"head": torch.tensor([1.0, float("nan"), 0.0]), "norm": torch.tensor(2.0), "rows": torch.ones(3, 2)}


def folder(path: Path, *parts: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for number, part in enumerate(parts):
        save_file(part, path / f"model-{number}.safetensors")
    return path


def test_the_same_bits_are_the_same_model_however_they_are_laid_out(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", TENSORS)
    split = folder(tmp_path / "split", {"rows": TENSORS["rows"]}, {name: TENSORS[name] for name in ("norm", "head")})
    assert difference(whole, split) == ""


@pytest.mark.parametrize(
    ("changed", "first", "how"),
    [
        ({"rows": TENSORS["rows"] + torch.tensor([0.0, 0.25])}, "rows", "by up to 0.25"),
        ({"head": torch.tensor([1.0, float("nan"), -0.0])}, "head", "by up to nan"),
        ({"norm": torch.tensor(2.0, dtype=torch.float64)}, "norm", "torch.float64 of (), not torch.float32 of ()"),
        ({"rows": torch.ones(2, 3)}, "rows", "torch.float32 of (2, 3), not torch.float32 of (3, 2)"),
        ({"extra": torch.ones(1)}, "extra", "which only one of the two has"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changed: dict[str, torch.Tensor], first: str, how: str) -> None:
    found = difference(folder(tmp_path / "ours", TENSORS | changed), folder(tmp_path / "theirs", TENSORS))
    assert found == f"1 of {len(TENSORS | changed)} tensors differ, first {first}, {how}"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"contains no \.safetensors files"):
        difference(folder(tmp_path / "ours"), folder(tmp_path / "theirs", TENSORS))


def test_settings_that_change_the_weights_are_recorded_and_others_are_not() -> None:
    theirs, ours = Config(), Config()
    ours.run.name, ours.learner.checkpoint_every, ours.actors.count, ours.run.seed = "other", 3, 7, 5
    assert differences(settings_of(theirs), settings_of(ours)) == []
    ours.optim.lr, ours.objective.clip_high, ours.learner.compile = 2e-6, 0.3, True
    assert differences(settings_of(theirs), settings_of(ours)) == [
        "learner.compile was False and is True",
        "objective.clip_high was 0.28 and is 0.3",
        "optim.lr was 1e-06 and is 2e-06",
    ]
    ours.warm_start.episodes = 4  # whose order is drawn by the seed
    assert "run.seed was unknown and is 5" in differences(settings_of(theirs), settings_of(ours))
