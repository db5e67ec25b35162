"""The reference of a run: where it is kept, and that nothing depends on a learner having stopped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.credit.reference import reference_at
from slipstream.learner.learner import Learner
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.learner.even_game import load_player, save, train
from tests.tools.run.tiny_model import save_tiny_model
from tests.whole.test_damaged_run import DAMAGES

IN_REWARD = ["objective.kl_place=reward", "objective.advantage=reinforce_pp", "objective.allocation=per_turn"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    merging_tokenizer(CHATML).save_pretrained(folder)
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    settings = ["optim.lr=3e-3", "learner.micro_batch_tokens=512", "learner.keep_checkpoints=1"]
    return load_config(None, [f"model.path={folder}", "objective.kl_coefficient=0.1", *settings, *overrides])


def kept(learner: Learner) -> list[str]:
    return sorted(path.name for path in learner.run_dir.reference.iterdir())


@pytest.mark.parametrize("place", [[], IN_REWARD], ids=["in the loss", "in the reward"])
def test_a_reference_is_the_same_for_a_learner_that_was_stopped(
    model_folder: Path, tmp_path: Path, ranks: Ranks, place: list[str]
) -> None:
    config = config_of(model_folder, *place)
    learner, player = load_player(config, tmp_path, ranks)
    assert kept(learner) == ["step_000000"]
    metrics, _ = train(learner, player, steps=2)
    assert [abs(step.reference_kl) < 1e-5 for step in metrics] == [True, False]
    save(learner)
    train(learner, player, steps=2)
    resumed, player = load_player(config, tmp_path, ranks)
    assert resumed.progress.step == 2
    train(resumed, player, steps=2)
    assert kept(resumed) == ["step_000000"]
    ours = dict(full_tensors(resumed.model))
    assert all(torch.equal(ours[name], tensor) for name, tensor in full_tensors(learner.model))


def test_a_half_written_reference_has_no_name(model_folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(model_folder)
    left = RunDir(tmp_path, config.run.name).reference / "step_000000.k1lled00.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    learner, _ = load_player(config, tmp_path, ranks)
    assert kept(learner) == ["step_000000"]
    began = dict(full_tensors(learner.models.reference))
    assert all(torch.equal(began[name], tensor) for name, tensor in full_tensors(learner.model))


def test_a_run_without_a_reference_has_none_and_cannot_begin_with_one_in_the_middle(
    model_folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    config = config_of(model_folder, "sampling.temperature=0.7")
    learner, _ = load_player(config, tmp_path, ranks)
    assert learner.models.reference.settings.temperature == learner.model.settings.temperature == 0.7
    other = RunDir(tmp_path, "other")
    with pytest.raises(ConfigError, match="wrote no reference at step 0"):
        reference_at(learner.model, config.objective, other, step=5, ranks=ranks)
    assert reference_at(learner.model, ObjectiveConfig(), other, step=0, ranks=ranks) is None


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_reference_is_refused_by_the_name_of_its_file(
    model_folder: Path, tmp_path: Path, ranks: Ranks, damage: Callable[[Path], None]
) -> None:
    config = config_of(model_folder)
    learner, player = load_player(config, tmp_path, ranks)
    train(learner, player, steps=1)
    save(learner)
    folder = learner.run_dir.reference / "step_000000"
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(ConfigError, match=rf"step_000000(?=.* is damaged: ).*{path.name}.*; restore"):
            load_player(config, tmp_path, ranks)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
