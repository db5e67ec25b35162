import doctest

import pytest

from slipstream.learner.batch import pack
from slipstream.learner.credit import gae, gigpo, grpo, reinforce_pp, token_rewards, tree, vtrace
from slipstream.learner.model import attention
from slipstream.learner.model.optimizer import lr_fraction


def fractions(schedule: str, *, warmup_steps: int, steps: list[int]) -> list[float]:
    return [lr_fraction(step, schedule=schedule, warmup_steps=warmup_steps, num_steps=100) for step in steps]


def test_schedules_go_from_the_top_to_zero() -> None:
    assert fractions("constant", warmup_steps=0, steps=[0, 75, 100]) == [1.0, 1.0, 1.0]
    assert fractions("linear", warmup_steps=0, steps=[0, 75, 100]) == pytest.approx([1.0, 0.25, 0.0])
    assert fractions("cosine", warmup_steps=0, steps=[0, 75, 100]) == pytest.approx([1.0, 0.146447, 0.0], abs=1e-6)


def test_the_warm_up_climbs_and_wastes_no_step_on_a_rate_of_zero() -> None:
    assert fractions("linear", warmup_steps=4, steps=[0, 1, 3, 4, 52]) == pytest.approx([0.2, 0.4, 0.8, 1.0, 0.5])


@pytest.mark.parametrize(
    "module",
    [attention, gae, gigpo, grpo, pack, reinforce_pp, token_rewards, tree, vtrace],
)
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
