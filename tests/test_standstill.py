"""When a run ends because its steps change nothing."""

import dataclasses

import pytest

from learner.standstill import MOST_STEPS, NothingLearned, Standstill
from tests.test_report import STEP

LEARNED = dataclasses.replace(STEP, grad_norm=0.5, skipped=False)
EMPTY = dataclasses.replace(STEP, grad_norm=0.0, skipped=False)
SKIPPED = dataclasses.replace(STEP, grad_norm=float("nan"), skipped=True)


def test_a_hundred_steps_in_a_row_without_a_change_end_the_run_with_both_reasons() -> None:
    standstill = Standstill()
    standstill.after(1, LEARNED)
    for step in range(2, 62):
        standstill.after(step, EMPTY)
    for step in range(62, 101):
        standstill.after(step, SKIPPED)
    with pytest.raises(NothingLearned) as error:
        standstill.after(101, SKIPPED)
    said = str(error.value)
    assert said.startswith(
        "step 101: the last 100 steps changed nothing; the norm of the gradient was 0 in 60: look at"
    )
    assert "; 40 were skipped, because the gradient was not finite or the guard refused it: lower `optim.lr`" in said


def test_one_step_that_changes_something_begins_the_count_again() -> None:
    standstill = Standstill()
    for step in range(3 * MOST_STEPS):
        standstill.after(step, LEARNED if step % (MOST_STEPS - 1) == 0 else EMPTY)
