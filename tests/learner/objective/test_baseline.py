"""Baselines that take in the whole batch: by hand, by a second derivation, and against what drops equal groups."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.objective.advantage import leave_one_out_advantages, returns_differ, standardised_advantages
from slipstream.learner.objective.baseline import gradient_energy, shrunk_advantages
from tests.learner.credit.test_token_advantages import group_of, two_turns

Groups = Sequence[np.ndarray]


def groups(*rows: Sequence[float]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float64) for row in rows]


def in_units(of: Groups) -> np.ndarray:
    """All numbers, with their own deviation as the unit."""
    flat = np.concatenate(of)
    return flat / flat.std()


def test_a_group_of_equal_returns_is_compared_with_the_batch() -> None:
    # Within: (0 + 1/3) / 2 = 1/6. The variance of the means 1 and 1/2 is 1/8; less 1/6 / 4, between is 1/12. With three
    # siblings trust is (1/12) / (1/12 + 1/18) = 3/5.
    first, second = shrunk_advantages(groups([1, 1, 1, 1], [1, 1, 0, 0]))
    expected_first = [1 - 0.6 * 1 - 0.4 * 5 / 7] * 4
    expected_second = [1 - 0.6 / 3 - 0.4 * 5 / 7] * 2 + [0 - 0.6 * 2 / 3 - 0.4 * 6 / 7] * 2
    expected = in_units([np.array(expected_first), np.array(expected_second)])
    assert np.concatenate([first, second]) == pytest.approx(expected, rel=1e-5)
    assert (first > 0).all()


def test_with_energies_every_mean_is_weighted() -> None:
    first, second = shrunk_advantages(groups([1, 1], [1, 0]), energies=groups([1, 2], [3, 4]))
    # Trust is 0, as in the docstring. Without the first: (2 + 3) / 9; the second: (1 + 3) / 8; then 3 / 7 and 6 / 6.
    expected = in_units([np.array([1 - 5 / 9, 1 - 4 / 8]), np.array([1 - 3 / 7, 0 - 6 / 6])])
    assert np.concatenate([first, second]) == pytest.approx(expected, rel=1e-5)


def test_where_tasks_differ_much_siblings_alone_are_believed() -> None:
    rows = groups([100, 101, 102], [0, 1, 3], [-100, -99, -95])
    found = in_units(shrunk_advantages(rows))
    assert found == pytest.approx(in_units([leave_one_out_advantages(row.tolist()) for row in rows]), abs=0.01)


def test_without_siblings_the_batch_is_all_there_is() -> None:
    found = shrunk_advantages(groups([1.0], [0.0], [0.0]))
    assert np.concatenate(found) == pytest.approx(in_units(groups([1.0], [-0.5], [-0.5])), rel=1e-5)
    (only,) = shrunk_advantages(groups([1.0, 0.0, 0.0]))  # one group: its members alone, as in RLOO
    assert only == pytest.approx(in_units([leave_one_out_advantages([1.0, 0.0, 0.0])]), rel=1e-5)
    mixed = shrunk_advantages(groups([1.0, 0.0], [1.0]))
    assert np.isfinite(np.concatenate(mixed)).all()
    assert np.concatenate(shrunk_advantages(groups([1.0]))).tolist() == [0.0]  # there is nothing to compare it with


@pytest.mark.parametrize(
    "returns",
    [groups([1, 1], [1, 1]), groups([0.3, 0.1 + 0.2], [0.3, 0.3]), groups([1e12 / 3] * 3, [1e12 / 3] * 3)],
)
def test_a_batch_of_equal_returns_has_no_advantages(returns: Groups) -> None:
    assert np.abs(np.concatenate(shrunk_advantages(returns))).max() < 1e-6


def test_energies_grow_with_what_the_policy_was_unsure_of_and_are_bounded() -> None:
    assert gradient_energy(np.log([0.5, 0.9]), ratios=np.array([1.0, 2.0])) == pytest.approx(0.25 + 0.04)
    assert gradient_energy(np.log([0.5]), ratios=np.array([1e8])) == pytest.approx(25 * 0.25)
    certain = gradient_energy(np.zeros(3), ratios=np.ones(3))
    assert certain > 0
    found = shrunk_advantages(groups([1, 1], [1, 0]), energies=groups([certain] * 2, [certain] * 2))
    assert np.concatenate(found) == pytest.approx(np.concatenate(shrunk_advantages(groups([1, 1], [1, 0]))), rel=1e-4)


def test_the_energy_of_a_token_is_within_twice_of_its_gradients_square_at_the_logits() -> None:
    for logits in np.random.default_rng(0).normal(0, 2, (50, 7)):
        probabilities = np.exp(logits) / np.exp(logits).sum()
        square = float(np.square(np.eye(7)[0] - probabilities).sum())
        energy = gradient_energy(np.log(probabilities[:1]), ratios=np.ones(1))
        assert energy <= square <= 2 * energy


def test_equal_groups_are_kept_and_teach() -> None:
    equal, unlike = (
        group_of(two_turns(0.0, 1.0), two_turns(0.0, 1.0)),
        group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0)),
    )
    current = np.log(np.array([0.5, 0.2, 0.9] * 4))
    for name in ("shrunk", "opob"):
        objective = ObjectiveConfig(advantage=name)
        assert teaches(equal, objective=objective)
        found = sequences_with_advantages(
            [equal, unlike], objective=objective, measured=Measured(current_logprobs=current)
        )
        assert [sequence.advantages[0] > 0 for sequence in found] == [True, True, True, False]


Maker = Callable[[Groups, Groups], Groups]


def signal_to_noise(advantages_of: Maker) -> float:
    """Of the gradient of one weight that moves the log-odds of success in all tasks alike, an episode played."""
    rng, gradients = np.random.default_rng(0), []
    for _ in range(300):
        chances = rng.beta(0.2, 0.2, size=8)
        won = rng.random((8, 8)) < chances[:, None]
        slopes = won - chances[:, None]  # of log(p)
        advantages = advantages_of([row.astype(np.float64) for row in won], [np.square(row) for row in slopes])
        gradients.append(np.mean([(a * s).mean() for a, s in zip(advantages, slopes, strict=True)]))
    return float(np.mean(gradients) / np.std(gradients) / 8)


def test_baselines_over_the_batch_waste_less_than_groups_whose_equal_ones_are_dropped() -> None:
    def dropping(returns: Groups, _: Groups) -> Groups:
        return [
            standardised_advantages(row.tolist()) if returns_differ(row.tolist()) else np.zeros(len(row))
            for row in returns
        ]

    found = {
        "group_standardised": signal_to_noise(dropping),
        "shrunk": signal_to_noise(lambda returns, _: shrunk_advantages(returns)),
        "opob": signal_to_noise(lambda returns, squares: shrunk_advantages(returns, energies=squares)),
    }
    print(found)
    assert 0.2 < found["group_standardised"] < 0.35
    assert found["shrunk"] > 1.4 * found["group_standardised"]
    assert found["opob"] > 1.15 * found["group_standardised"]
