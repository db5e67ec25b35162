"""The reference of a run: where it is kept, and that nothing depends on a learner having stopped."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from slipstream.common.config.config import Config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.credit.reference import reference_at
from slipstream.learner.learner import Learner, begin
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from tests.learner.credit.test_distillation import config_of, student
from tests.learner.even_game import load_player, save, train
from tests.whole.test_damaged_run import DAMAGES

__all__ = ["student"]  # a fixture
IN_REWARD = ["objective.kl_place=reward", "objective.advantage=reinforce_pp", "objective.allocation=per_turn"]
Load = Callable[..., tuple[Learner, PreTrainedModel]]


@pytest.fixture
def load(student: Path, tmp_path: Path, ranks: Ranks) -> Load:
    """Loads the run's learner, with such settings, and who plays for it."""
    settings = ("objective.kl_coefficient=0.1", "learner.keep_checkpoints=1")
    return lambda *overrides: load_player(config_of(student, *settings, *overrides), tmp_path, ranks)


def kept(learner: Learner) -> list[str]:
    return sorted(path.name for path in learner.run_dir.reference.iterdir())


@pytest.mark.parametrize("place", [[], IN_REWARD], ids=["in the loss", "in the reward"])
def test_a_reference_is_the_same_for_a_learner_that_was_stopped(load: Load, place: list[str]) -> None:
    learner, player = load(*place)
    assert kept(learner) == ["step_000000"]
    metrics, _ = train(learner, player, steps=2)
    assert [abs(step.reference_kl) < 1e-5 for step in metrics] == [True, False]
    save(learner)
    train(learner, player, steps=2)
    resumed, player = load(*place)
    assert resumed.progress.step == 2
    train(resumed, player, steps=2)
    assert kept(resumed) == ["step_000000"]
    ours = dict(full_tensors(resumed.model))
    assert all(torch.equal(ours[name], tensor) for name, tensor in full_tensors(learner.model))


def test_a_half_written_reference_has_no_name(load: Load, tmp_path: Path) -> None:
    left = RunDir(tmp_path, Config().run.name).reference / "step_000000.k1lled00.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    learner, _ = load()
    assert kept(learner) == ["step_000000"]
    began = dict(full_tensors(learner.models.reference))
    assert all(torch.equal(began[name], tensor) for name, tensor in full_tensors(learner.model))


def test_a_run_begins_with_its_reference_or_has_none(load: Load, tmp_path: Path, ranks: Ranks) -> None:
    learner, _ = load("sampling.temperature=0.7")
    assert learner.models.reference.settings.temperature == learner.model.settings.temperature == 0.7
    other = RunDir(tmp_path, "other")
    with pytest.raises(ConfigError, match="wrote no reference at step 0"):
        reference_at(learner.model, learner.config.objective, other, step=5, ranks=ranks)
    assert reference_at(learner.model, ObjectiveConfig(), other, step=0, ranks=ranks) is None


def test_a_damaged_reference_is_refused_by_the_name_of_its_file(load: Load) -> None:
    learner, player = load()
    train(learner, player, steps=1)
    folder = learner.run_dir.reference / "step_000000"
    for damage, path in product(DAMAGES, sorted(folder.iterdir())):
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(ConfigError, match=rf"step_000000(?=.* is damaged: ).*{path.name}.*; restore"):
            begin(learner)  # as a resumed learner does
            pytest.fail(f"{damage.__name__} was not seen")
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    begin(learner)
