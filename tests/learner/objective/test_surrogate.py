"""Each surrogate against hand-computed numbers, a derivation by cases, and differences where it claims a gradient."""

import math

import pytest
from hypothesis import assume
from torch import Tensor

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.objective.ratio import Sequences, ratio
from slipstream.learner.objective.surrogate import (
    Surrogate,
    clipped,
    gspo_ratio,
    policy_gradient,
    surrogate,
    truncated_gradient,
    trust_region,
    within_total_variation,
)
from tests.learner.policies import Tokens, any_batch, float64, gradient, of_lengths, slopes

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
Numbers = tuple[float, ...]


def batch(*, now: Numbers, then: Numbers, advantages: Numbers, sequences: Sequences | None = None) -> Tokens:
    """Tokens of these probabilities under the current policy and under behaviour."""
    current, behaviour = float64(*now).log(), float64(*then).log()
    sequences = sequences or of_lengths(len(now))
    return Tokens(current=current, behaviour=behaviour, advantages=float64(*advantages), sequences=sequences)


def losses(found: Surrogate) -> list[float]:
    return [float(loss) for loss in found.losses.detach()]


def test_the_dual_clip_bounds_what_a_negative_advantage_can_cost() -> None:
    found = clipped(float64(6, 2, 6), advantages=float64(-2, -2, 2), **CLIPS, dual_clip=3.0)
    assert losses(found) == pytest.approx([6.0, 4.0, -2.56])
    assert found.held_back.tolist() == [True, False, True]


@any_batch
def test_ppos_clip_equals_a_derivation_by_cases(tokens: Tokens) -> None:
    ratios = ratio(tokens.current, other_logprobs=tokens.behaviour)
    for dual_clip in (0.0, 3.0):
        expected = []
        for now, then, advantage in zip(tokens.current, tokens.behaviour, tokens.advantages.tolist(), strict=True):
            times = math.exp(now) / math.exp(then)
            # An advantage is worth at most (1 + clip) of itself; a disadvantage costs at least (1 - clip) of itself,
            # and with a dual clip at most that many times itself.
            if advantage >= 0:
                worth = min(times, 1.28) * advantage
            else:
                worth = min(max(times, 0.8), dual_clip or math.inf) * advantage
            expected.append(-worth)
        found = clipped(ratios, advantages=tokens.advantages, **CLIPS, dual_clip=dual_clip)
        assert losses(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@any_batch
def test_ppos_gradient_is_that_of_differences_and_nothing_where_it_holds_back(tokens: Tokens) -> None:
    ratios = ratio(tokens.current, other_logprobs=tokens.behaviour)
    assume(all(float((ratios - kink).abs().min()) > 1e-4 for kink in (0.8, 1.28, 3.0)))

    def loss_of(current: Tensor) -> Tensor:
        ratios = ratio(current, other_logprobs=tokens.behaviour)
        return clipped(ratios, advantages=tokens.advantages, **CLIPS, dual_clip=3.0).losses

    found = gradient(loss_of, tokens.current)
    assert found == pytest.approx(slopes(loss_of, tokens.current), rel=1e-5, abs=1e-6)
    held_back = clipped(ratios, advantages=tokens.advantages, **CLIPS, dual_clip=3.0).held_back.tolist()
    assert all(slope == 0 for slope, held in zip(found, held_back, strict=True) if held)


def test_gspo_gives_all_tokens_of_a_sequence_the_geometric_mean_of_their_ratios() -> None:
    tokens = batch(now=(0.8, 0.1, 0.3), then=(0.2, 0.1, 0.1), advantages=(1, 1, 1), sequences=of_lengths(2, 1))
    assert gspo_ratio(tokens.read()).tolist() == pytest.approx([2, 2, 3])
    assert gradient(lambda at: gspo_ratio(tokens.read(at)), tokens.current) == pytest.approx([2, 2, 3])


@any_batch
def test_gspos_mean_over_a_sequence_has_the_gradient_of_the_papers_sequence_loss(tokens: Tokens) -> None:
    """With one advantage a sequence: mean over sequences of min(s A, clip(s) A), by differences of it."""
    clips = {"clip_low": 3e-4, "clip_high": 4e-4}
    num_sequences = len(tokens.members)
    of_sequence = tokens.sequences.means(tokens.advantages)

    def paper(current: Tensor) -> Tensor:
        total = float64(0.0)
        for members in tokens.members:
            mean_log_ratio = sum(current[i] - tokens.behaviour[i] for i in members) / len(members)
            whole = math.exp(float(mean_log_ratio))
            advantage = float(of_sequence[members[0]])
            total -= min(whole * advantage, min(max(whole, 1 - 3e-4), 1 + 4e-4) * advantage) / num_sequences
        return total

    def ours(current: Tensor) -> Tensor:
        each = clipped(gspo_ratio(tokens.read(current)), advantages=of_sequence, **clips, dual_clip=0.0).losses
        return each / tokens.sequences.sums(each.new_ones(len(each))) / num_sequences

    wholes = gspo_ratio(tokens.read())
    assume(all(float((wholes - kink).abs().min()) > 1e-5 for kink in (1 - 3e-4, 1 + 4e-4)))
    assert float(ours(tokens.current).sum()) == pytest.approx(float(paper(tokens.current).sum()), rel=1e-9, abs=1e-12)
    assert gradient(ours, tokens.current) == pytest.approx(slopes(paper, tokens.current), rel=1e-5, abs=1e-6)


def test_cispo_caps_the_weight_and_keeps_the_gradient_of_every_token() -> None:
    tokens = batch(now=(0.8, 0.1, 0.3), then=(0.1, 0.2, 0.3), advantages=(2, 2, -1))
    found = truncated_gradient(tokens.read(), ratio_high=5.0)
    # Ratios 8, 0.5 and 1 weigh 5, 0.5 and 1.
    assert losses(found) == pytest.approx([-10 * math.log(0.8), -math.log(0.1), math.log(0.3)])
    assert found.held_back.tolist() == [True, False, False]


@any_batch
def test_the_truncated_gradient_is_minus_weight_times_advantage(tokens: Tokens) -> None:
    expected = [
        -min(math.exp(now) / math.exp(then), 5.0) * advantage
        for now, then, advantage in zip(tokens.current, tokens.behaviour, tokens.advantages.tolist(), strict=True)
    ]
    found = gradient(lambda at: truncated_gradient(tokens.read(at), ratio_high=5.0).losses, tokens.current)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@any_batch
def test_total_variation_equals_a_derivation_by_cases(tokens: Tokens) -> None:
    trusted = within_total_variation(tokens.read(), max_divergence=0.2)
    for index, advantage in enumerate(tokens.advantages.tolist()):
        now, then = math.exp(tokens.current[index]), math.exp(tokens.behaviour[index])
        onwards = now - then if advantage > 0 else then - now  # in the direction that the advantage pushes
        assert bool(trusted[index]) is (onwards <= 0.2)


def test_a_token_outside_the_trust_region_has_neither_loss_nor_gradient() -> None:
    tokens = batch(now=(0.8, 0.2), then=(0.1, 0.1), advantages=(1, 1))

    def found(at: Tensor) -> Surrogate:
        return trust_region(tokens.read(at), trusted=float64(1, 0).bool(), ratio_high=5.0)

    assert losses(found(tokens.current)) == pytest.approx([-5 * math.log(0.8), 0])
    assert gradient(lambda at: found(at).losses, tokens.current) == pytest.approx([-5, 0])
    assert found(tokens.current).held_back.tolist() == [False, True]


@any_batch
def test_at_zero_lag_every_surrogate_has_the_gradient_of_the_plain_policy_gradient(tokens: Tokens) -> None:
    for name in ("ppo_clip", "gspo", "cispo", "dppo_tv"):
        objective = ObjectiveConfig(surrogate=name, dual_clip=3.0)

        def loss_of(at: Tensor, objective: ObjectiveConfig = objective) -> Tensor:
            return surrogate(tokens.read(at), objective=objective).losses

        found = gradient(loss_of, tokens.behaviour)
        assert found == pytest.approx([-advantage for advantage in tokens.advantages.tolist()], abs=1e-12)


def test_the_policy_gradient_knows_no_ratio() -> None:
    tokens = batch(now=(0.6, 0.1), then=(0.2, 0.9), advantages=(2, -1))
    found = policy_gradient(tokens.read())
    assert losses(found) == pytest.approx([-2 * math.log(0.6), math.log(0.1)])
    assert gradient(lambda at: policy_gradient(tokens.read(at)).losses, tokens.current) == [-2.0, 1.0]
    assert not found.held_back.any()
