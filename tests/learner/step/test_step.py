"""One optimizer step: what the guard and the normalisation make of it."""

import dataclasses
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import TokenSequence, micro_batches, numbered
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.objective import guard
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.learner.step.step_metrics import StepMetrics
from tests.learner.devices import on_cpu
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model

OPTIM = OptimConfig(lr=1e-3, schedule="linear")
SEQUENCES = [random_sequence(length, seed=length) for length in (20, 14, 9, 6)]


def sampled_by(model: PackedModel, *, shift: float) -> list[TokenSequence]:
    """SEQUENCES with behaviour log-probabilities that are the model's own, less `shift` nats on every other token."""
    found = []
    for sequence in SEQUENCES:
        (packed,) = micro_batches([sequence], max_tokens=50, num_ranks=1, rank=0)
        with torch.no_grad():
            logprobs = model(packed.to(next(model.parameters()).device)).logprobs.cpu().numpy()
        behaviour = np.zeros(sequence.num_tokens, dtype=np.float32)
        behaviour[sequence.loss_mask] = logprobs - shift * (np.arange(len(logprobs)) % 2)
        found.append(dataclasses.replace(sequence, behaviour_logprobs=behaviour))
    return found


def step(
    folder: Path,
    ranks: Ranks,
    objective: ObjectiveConfig,
    *,
    shift: float = 0.0,
    max_tokens: int = 50,
    reference: PackedModel | None = None,
    branches_of_first: int = 1,  # sequences that the first trajectory has; each other has one
) -> tuple[StepMetrics, dict[str, torch.Tensor], int]:
    """The metrics, how far each weight moved, and where the schedule stands."""
    model = load_model(folder, ranks=ranks, settings=FLOAT32)
    optimizer = make_optimizer(model, config=OPTIM)
    schedule = make_schedule(optimizer, config=OPTIM, num_steps=10)
    sampled = sampled_by(model, shift=shift)
    sequences = numbered([sampled[:branches_of_first], *([other] for other in sampled[branches_of_first:])])
    before = {name: tensor.clone() for name, tensor in full_tensors(model)}
    settings = StepSettings(objective=objective, max_grad_norm=1.0)
    batch = StepBatch.of(sequences, micro_batches(sequences, max_tokens=max_tokens, num_ranks=1, rank=0))
    models = StepModels(policy=model, optimizer=optimizer, schedule=schedule, reference=reference)
    metrics = train_step(models, batch, settings=settings, ranks=ranks)
    moved = {name: tensor - before[name] for name, tensor in full_tensors(model)}
    return metrics, moved, schedule.last_epoch


def test_a_healthy_step_is_whole(tiny: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    metrics, moved, schedule_step = step(tiny, ranks, ObjectiveConfig())
    assert (metrics.guard_scale, metrics.skipped, metrics.lr, schedule_step) == (1.0, False, 1e-3, 1)
    assert metrics.effective_sample_size == pytest.approx(1.0, abs=1e-4)
    assert any(bool(change.abs().max() > 0) for change in moved.values())
    assert caplog.records == []


def test_an_exploded_mean_weight_changes_nothing(tiny: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    objective = ObjectiveConfig(surrogate="cispo", correction="none", max_negative_kl=0.0)
    with caplog.at_level(logging.WARNING):
        metrics, moved, schedule_step = step(tiny, ranks, objective, shift=2.0)
    assert metrics.evidence.weight_mean == pytest.approx((5 * 17 + 20) / 37)  # 17 of 37 ratios are e^2, cut to 5
    assert (metrics.guard_scale, metrics.skipped, metrics.lr, schedule_step) == (0.0, True, 0.0, 0)
    assert all(bool(change.abs().max() == 0) for change in moved.values())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("guard: learning rate of this step scaled by 0: the mean weight in the gradient is ")


def test_few_effective_samples_shrink_a_step(tiny: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, moved_whole, _ = step(tiny, ranks, ObjectiveConfig(guard=False), shift=1.0)
    monkeypatch.setattr(guard, "MIN_ESS", 0.99)
    monkeypatch.setattr(guard, "MAX_RATIO", 9.0)
    shrunk, moved_shrunk, schedule_step = step(tiny, ranks, ObjectiveConfig(), shift=1.0)
    assert whole.evidence.token_ess < 0.9
    assert shrunk.guard_scale == pytest.approx(math.sqrt(whole.evidence.token_ess / 0.99))
    assert shrunk.lr == pytest.approx(1e-3 * shrunk.guard_scale)
    assert schedule_step == 1
    for name, change in moved_whole.items():
        torch.testing.assert_close(moved_shrunk[name], change * shrunk.guard_scale, rtol=1e-3, atol=2e-8)


GSPO = ObjectiveConfig(surrogate="gspo", clip_low=0.01, clip_high=0.01, normalisation="sequences", entropy_bonus=0.01)


@pytest.mark.parametrize("objective", [ObjectiveConfig(), GSPO], ids=["default", "gspo"])
def test_micro_batches_of_any_size_make_the_same_step(
    tiny: Path, ranks: Ranks, device: torch.device, objective: ObjectiveConfig
) -> None:
    """Those of a GPU make that of the CPU."""
    together, moved_together, _ = step(tiny, on_cpu(ranks), objective, shift=0.3)
    apart, moved_apart, _ = step(tiny, ranks, objective, shift=0.3, max_tokens=20)
    assert (together.num_micro_batches, apart.num_micro_batches) == (1, 3)
    tolerance = 1e-5 if device.type == "cpu" else 1e-4
    assert apart.loss == pytest.approx(together.loss, rel=tolerance)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=tolerance)
    assert apart.masked_sequence_fraction == pytest.approx(together.masked_sequence_fraction)
    # The first step of Adam divides each gradient by itself: where it is all but zero, rounding decides its sign.
    for name, change in moved_together.items():
        assert change.any()
        assert float((moved_apart[name].cpu() - change).abs().mean()) < 1e-5, name


def test_by_sequences_a_trajectory_counts_once_however_often_its_history_is_rewritten(tiny: Path, ranks: Ranks) -> None:
    """Branches in packs of their own, the first two of one trajectory: its mean is over the tokens of both."""
    by_sequences = ObjectiveConfig(normalisation="sequences")
    metrics, _, _ = step(tiny, ranks, by_sequences, max_tokens=20, branches_of_first=2)
    advantages = [float(-sequence.advantages[-1]) for sequence in SEQUENCES]
    of_both = (17 * advantages[0] + 11 * advantages[1]) / 28
    assert metrics.num_micro_batches == 3
    assert metrics.loss == pytest.approx((of_both + advantages[2] + advantages[3]) / 3, rel=1e-4)


def test_an_entropy_bonus_makes_the_policy_less_sure(tiny: Path, ranks: Ranks) -> None:
    plain, moved_plain, _ = step(tiny, ranks, ObjectiveConfig())
    bonus, moved_bonus, _ = step(tiny, ranks, ObjectiveConfig(entropy_bonus=10.0))
    assert bonus.loss == pytest.approx(plain.loss - 10 * plain.entropy, rel=1e-4)
    assert any(bool((moved_bonus[name] - change).abs().max() > 1e-4) for name, change in moved_plain.items())


def test_the_reference_holds_back_a_step_that_moves_away_from_it(tiny: Path, ranks: Ranks, tmp_path: Path) -> None:
    objective = ObjectiveConfig(kl_coefficient=0.1)
    same, _, _ = step(tiny, ranks, objective, reference=load_model(tiny, ranks=ranks, settings=FLOAT32))
    alone, _, _ = step(tiny, ranks, ObjectiveConfig())
    assert same.reference_kl == pytest.approx(0, abs=1e-6)
    assert same.loss == pytest.approx(alone.loss, rel=1e-5)
    far = load_model(save_tiny_model(tmp_path, seed=7), ranks=ranks, settings=FLOAT32)
    held, _, _ = step(tiny, ranks, objective, reference=far)
    assert held.reference_kl > 0.1
    assert held.loss == pytest.approx(alone.loss + 0.1 * held.reference_kl, rel=1e-4)
    assert all(parameter.grad is None for parameter in far.parameters())
