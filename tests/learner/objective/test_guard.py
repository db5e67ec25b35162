"""The guard: what it judges of a batch, and what it makes of a step."""

import dataclasses
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.common.config.config import load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.guard import Evidence, decide, trajectory_ess
from slipstream.learner.objective.ratio import Sequences
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step import step_metrics
from slipstream.learner.step.loss import PolicyLoss, policy_loss
from slipstream.learner.step.step_metrics import MicroBatchSums
from tests.learner.policies import Tokens, any_batch, loss_tokens, of_lengths

OBJECTIVE = ObjectiveConfig()
PRESETS = sorted((Path(__file__).parents[3] / "conf" / "objective").glob("*.yaml"))
WHOLE = Evidence(weight_mean=1.0, token_ess=1.0, trajectory_ess=1.0)


def changed(**changes: float) -> Evidence:
    return dataclasses.replace(WHOLE, **changes)


def test_a_healthy_step_is_made_whole() -> None:
    for evidence in (WHOLE, changed(weight_mean=1.02, token_ess=0.42), changed(weight_mean=0.98, trajectory_ess=0.3)):
        decision = decide(evidence, objective=OBJECTIVE)
        assert (decision.scale, decision.reason) == (1.0, "")


@pytest.mark.parametrize(("of", "ess"), [("tokens", "token_ess"), ("trajectories", "trajectory_ess")])
def test_few_effective_samples_of_either_sort_shrink_the_step_by_the_square_root(of: str, ess: str) -> None:
    decision = decide(changed(**{ess: 0.075}), objective=OBJECTIVE)
    assert decision.scale == pytest.approx(0.5)
    assert decision.reason == f"the effective sample size is 0.075 of the {of}, below 0.3 (objective.guard)"


@pytest.mark.parametrize("weight_mean", [2.1, 0.49, float("nan")])
def test_a_mean_weight_far_from_one_skips_the_step(weight_mean: float) -> None:
    decision = decide(changed(weight_mean=weight_mean), objective=OBJECTIVE)
    assert decision.scale == 0.0
    assert "outside [0.5, 2] (objective.guard)" in decision.reason


def test_the_guard_can_be_off() -> None:
    off = ObjectiveConfig(guard=False)
    assert decide(Evidence(weight_mean=50.0, token_ess=0.01, trajectory_ess=0.01), objective=off).scale == 1.0


def test_the_trajectories_sample_size_agrees_with_the_numbers_in_its_docstring() -> None:
    hundred = torch.full((4,), 100.0)
    assert trajectory_ess(torch.tensor([0.0, 0.0, 0.0, 10.0]), num_tokens=hundred) == pytest.approx(math.exp(-0.1875))
    torch.manual_seed(0)
    for num_tokens in (50, 500, 5000):  # 0.001 nats a token of independent noise
        sums = math.sqrt(0.002 * num_tokens) * torch.randn(4000) - 0.001 * num_tokens
        assert trajectory_ess(sums, num_tokens=torch.full((4000,), float(num_tokens))) == pytest.approx(0.998, abs=5e-4)
    for num_tokens, expected in ((25, 0.78), (100, 0.37), (400, 0.05)):  # 0.1 nats a token that all tokens share
        sums = 0.1 * num_tokens * torch.randn(4000)
        found = trajectory_ess(sums, num_tokens=torch.full((4000,), float(num_tokens)))
        assert found == pytest.approx(expected, abs=0.02)


def test_of_all_that_went_wrong_at_most_what_one_trajectory_is_worth_is_left() -> None:
    assert trajectory_ess(torch.tensor([-1e6, 1e6]), num_tokens=torch.full((2,), 100.0)) == 0.5
    assert trajectory_ess(torch.tensor([1e6]), num_tokens=torch.tensor([100.0])) == 1.0
    assert trajectory_ess(torch.zeros(3), num_tokens=torch.zeros(3)) == 1.0  # the correction left nothing


def loss_of(log_ratios: Tensor, advantages: Tensor, sequences: Sequences, objective: ObjectiveConfig) -> PolicyLoss:
    behaviour = torch.full_like(log_ratios, -25.0)
    current = (behaviour + log_ratios).requires_grad_()
    tokens = loss_tokens(current, behaviour, advantages, sequences=sequences)
    return policy_loss(tokens, objective=objective)


def evidence_of(losses: list[tuple[PolicyLoss, Sequences]], *, num_trajectories: int, ranks: Ranks) -> Evidence:
    rest = {"value_loss": None, "entropy_sum": torch.zeros(()), "num_computed_tokens": 0, "num_pairs": 0}
    parts = [MicroBatchSums(loss=loss, trajectories=each.trajectories, **rest) for loss, each in losses]
    sums = step_metrics.trajectory_sums_over_ranks(parts, num_trajectories=num_trajectories, ranks=ranks)
    return step_metrics.evidence_from(sums, step_metrics.measured_over_ranks(parts, ranks=ranks))


def bounded(preset: Path) -> ObjectiveConfig:
    """The preset's objective; where nothing bounds a negative advantage, with the clip that does."""
    objective = load_config(str(preset), []).objective
    unbounded = objective.surrogate in ("ppo_clip", "gspo") and objective.correction == "none"
    return dataclasses.replace(objective, dual_clip=3.0) if unbounded and not objective.dual_clip else objective


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_one_broken_actor_of_64_never_stalls_a_run(ranks: Ranks, preset: Path) -> None:
    objective, sequences = bounded(preset), of_lengths(*[40] * 64)
    noise = 0.05 * torch.randn(64 * 40, generator=torch.Generator().manual_seed(0))
    # A whole trajectory with the largest weight that any objective allows is worth a slightly smaller step.
    least = 0.85 if objective.surrogate.startswith("dppo") and objective.ratio_high > 10 else 1.0
    for ratio, advantage, num_broken_tokens in product((1e-8, 500.0, 1e5, 1e8), (1.0, -1.0), (1, 40)):
        log_ratios, advantages = noise.clone(), torch.tensor([1.0, -1.0]).repeat_interleave(40).repeat(32)
        log_ratios[:num_broken_tokens] = math.log(ratio)
        advantages[:40] = advantage
        loss = loss_of(log_ratios, advantages, sequences, objective)
        evidence = evidence_of([(loss, sequences)], num_trajectories=64, ranks=ranks)
        assert decide(evidence, objective=objective).scale >= least, (ratio, advantage, num_broken_tokens, evidence)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_batch_of_which_nothing_is_left_is_no_reason_to_stop(ranks: Ranks, preset: Path) -> None:
    sequences, objective = of_lengths(2, 2), bounded(preset)
    loss = loss_of(torch.zeros(4), torch.zeros(4), sequences, objective)  # no advantage, no gradient
    assert float(loss.num_weighed) == 0
    assert decide(evidence_of([(loss, sequences)], num_trajectories=2, ranks=ranks), objective=objective).scale == 1.0
    masked = dataclasses.replace(objective, correction="token_mask", surrogate="ppo_clip", clip_low=0.2, clip_high=0.2)
    loss = loss_of(torch.full((4,), 9.0), torch.ones(4), sequences, masked)
    assert float(loss.num_masked) == 4
    assert evidence_of([(loss, sequences)], num_trajectories=2, ranks=ranks) == WHOLE


def test_trajectories_that_collapse_shrink_a_step_whose_tokens_look_healthy(ranks: Ranks) -> None:
    """Each token of a trajectory is 10 % more or less likely than it was, as all others of its trajectory are."""
    sequences, drifts = of_lengths(*[400] * 64), 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    objective = ObjectiveConfig(max_negative_kl=0.0)
    advantages = torch.tensor([1.0, -1.0]).repeat_interleave(400).repeat(32)
    loss = loss_of(drifts.repeat_interleave(400), advantages, sequences, objective)
    evidence = evidence_of([(loss, sequences)], num_trajectories=64, ranks=ranks)
    assert evidence.token_ess > 0.98
    assert evidence.trajectory_ess < 0.1
    assert 0.2 < decide(evidence, objective=objective).scale < 0.6


def test_a_trajectory_is_one_however_its_branches_are_packed(ranks: Ranks) -> None:
    log_ratios, advantages = torch.tensor([0.1, 0.3, -0.2, 0.4, 0.0, 0.2]), torch.ones(6)
    whole = of_lengths(3, 3)
    loss = loss_of(log_ratios, advantages, whole, OBJECTIVE)
    together = evidence_of([(loss, whole)], num_trajectories=2, ranks=ranks)
    apart = []
    for start, stop, trajectory in ((0, 1, 0), (1, 3, 0), (3, 6, 1)):
        branch = dataclasses.replace(of_lengths(stop - start), trajectories=torch.tensor([trajectory]))
        apart.append((loss_of(log_ratios[start:stop], advantages[start:stop], branch, OBJECTIVE), branch))
    found = evidence_of(apart, num_trajectories=2, ranks=ranks)
    means = [0.2 / 3, 0.6 / 3]
    assert together.trajectory_ess == pytest.approx(math.exp(-3 * (means[1] - means[0]) ** 2 / 4), rel=1e-5)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(together), rel=1e-5)


@any_batch
def test_the_guards_weights_are_those_of_the_gradient(tokens: Tokens) -> None:
    surrogates = ("ppo_clip", "gspo", "cispo", "dppo_tv", "policy_gradient")
    for surrogate, correction in product(surrogates, ("none", "token_mask")):
        objective = ObjectiveConfig(surrogate=surrogate, correction=correction, dual_clip=3.0)
        current = tokens.current.clone().requires_grad_()
        loss = policy_loss(tokens.read(current), objective=objective)
        (slope,) = torch.autograd.grad(loss.loss_sum, current)
        weighed = tokens.advantages != 0
        weights = (slope[weighed] / tokens.advantages[weighed]).abs()
        found, expected = (loss.weight_sum, loss.weight_square_sum), (weights.sum(), weights.square().sum())
        assert [*map(float, found)] == pytest.approx([*map(float, expected)], rel=1e-9, abs=1e-12), objective
