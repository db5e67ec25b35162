"""On-policy distillation: the advantages from a teacher, that a policy comes nearer to it, and what is refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import pack_logprobs
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.objective.coherence import check_coherence
from slipstream.learner.ranks.ranks import Ranks
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer, merging_tokenizer
from tests.learner.credit.test_token_advantages import group_of, two_turns
from tests.learner.even_game import load_player, train
from tests.learner.even_game import save as save_checkpoint
from tests.learner.model.test_model_families import STATEFUL, save
from tests.learner.objective.test_objective_proof import MAX_WEIGHT, inert_changes, largest_weight
from tests.tools.run.tiny_model import save_tiny_model

DISTIL = ["objective.advantage=distillation", "objective.kl_place=reward", "objective.kl_coefficient=1"]
FROM_A, FROM_URL = ([*DISTIL, f"objective.reference_model={at}"] for at in ("a", "http://127.0.0.1:1/v1"))


def teacher_of(folder: Path, *, seed: int = 1, **changes: object) -> Path:
    save_tiny_model(folder, seed=seed, **changes)
    merging_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_of(tmp_path_factory.mktemp("student"), seed=0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model than the student."""
    return teacher_of(tmp_path_factory.mktemp("teacher"), num_hidden_layers=3, intermediate_size=192)


def config_of(student: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.path={student}", "optim.lr=3e-3", "learner.micro_batch_tokens=512", *overrides])


def test_each_token_has_the_advantage_of_the_teacher_over_the_policy_whatever_was_earned() -> None:
    first = msgspec.structs.replace(two_turns(0.0, 1.0), behaviour_logprobs=pack_logprobs([0, -1, -2, 0, -0.5]))
    second = two_turns(5.0, 5.0)  # every sampled token at -1
    objective = ObjectiveConfig(advantage="distillation", kl_place="reward", kl_coefficient=2.0, reference_model="any")
    measured = Measured(reference_logprobs=np.array([-0.5, -3, -0.5, -1, -2, -1]))
    found = sequences_with_advantages([group_of(first, second)], objective=objective, measured=measured)
    # Twice the difference: -0.5 - -1, -3 - -2, -0.5 - -0.5; -1 - -1, -2 - -1, -1 - -1.
    assert [each.advantages[each.loss_mask].tolist() for each in found] == [[1, -2, 0], [0, -2, 0]]
    assert teaches(group_of(second, second), objective=objective), "equal returns are no reason to drop a group"


@pytest.mark.long
def test_a_policy_comes_nearer_to_a_larger_teacher(student: Path, teacher: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(student, *DISTIL, f"objective.reference_model={teacher}")
    learner, player = load_player(config, tmp_path, ranks)
    before = [tensor.clone() for _, tensor in full_tensors(learner.models.reference)]  # type: ignore[arg-type]
    divergence = [step.reference_kl for step in train(learner, player, steps=30)[0]]
    assert np.mean(divergence[-5:]) < 0.8 * np.mean(divergence[:5])
    after = [tensor for _, tensor in full_tensors(learner.models.reference)]  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "the teacher never changes"
    assert not learner.run_dir.reference.exists(), "it is read from its own folder"


@pytest.mark.parametrize("overrides", [DISTIL, ["objective.kl_coefficient=1"]], ids=["in the reward", "in the loss"])
def test_a_teacher_whose_layers_carry_a_state_reads_what_its_student_would_compute_once(
    student: Path, tmp_path: Path, ranks: Ranks, overrides: list[str]
) -> None:
    folder = save(STATEFUL["lfm2"], tmp_path / "hybrid")
    merging_tokenizer(CHATML).save_pretrained(folder)
    config = config_of(student, *overrides, f"objective.reference_model={folder}")
    learner, player = load_player(config, tmp_path, ranks)
    assert learner.model.shares_prefixes and learner.models.reference and not learner.models.reference.shares_prefixes
    (shared,), _ = train(learner, player, steps=1)
    learner, player = load_player(config, tmp_path, ranks)
    learner.model.shares_prefixes = False
    (apart,), _ = train(learner, player, steps=1)
    assert shared.reference_kl == apart.reference_kl > 0


def test_a_resumed_learner_has_its_teacher_again(student: Path, teacher: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(student, *DISTIL, f"objective.reference_model={teacher}")
    learner, player = load_player(config, tmp_path, ranks)
    train(learner, player, steps=1)
    save_checkpoint(learner)
    (expected,), _ = train(learner, player, steps=1)
    resumed, player = load_player(config, tmp_path, ranks)
    assert resumed.progress.step == 1
    (found,), _ = train(resumed, player, steps=1)
    assert found.reference_kl == expected.reference_kl


def test_a_teacher_of_another_tokenizer_is_refused(student: Path, tmp_path: Path, ranks: Ranks) -> None:
    other = save_tiny_model(tmp_path / "other")
    byte_tokenizer(CHATML).save_pretrained(other)
    with pytest.raises(ConfigError, match=r"`objective.reference_model` .*another tokenizer"):
        load_player(config_of(student, *DISTIL, f"objective.reference_model={other}"), tmp_path, ranks)


def test_every_key_of_distillation_acts_and_no_token_weighs_without_a_bound() -> None:
    config = load_config(None, [*DISTIL, "objective.reference_model=any"])
    check_coherence(config)
    assert inert_changes(config) == []
    assert largest_weight(config.objective) <= MAX_WEIGHT * (1 + 1e-9)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["objective.advantage=distillation"], "set objective.reference_model to the teacher's folder"),
        ([*FROM_A, "objective.kl_place=loss"], "kl_place=reward"),
        ([*FROM_A, "objective.reward_model=b"], "learns from no reward"),
        ([*FROM_A, "objective.allocation=per_turn"], "no effect"),
        ([*FROM_A, "objective.gamma=0.9"], "no effect"),
        ([*FROM_A, "replay.keep_fraction=0.5"], "replay.keep_fraction.*learns nothing"),
        (["objective.reference_model=a"], "no effect with objective.kl_coefficient 0"),
        ([*FROM_URL, "sampling.temperature=0.7"], "`sampling.temperature` must be 1 with a URL"),
        ([*FROM_URL, "sampling.top_k=20"], "`sampling.top_k` must be 0 with a URL"),
        ([*FROM_URL, "objective.kl_place=loss"], "kl_place"),
    ],
)
def test_settings_that_a_teacher_or_its_server_cannot_follow_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_coherence(load_config(None, overrides))
