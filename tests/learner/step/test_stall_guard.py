"""When a run ends because its steps change nothing: as finished if its tasks are solved, else with an error."""

import dataclasses

import pytest

from slipstream.learner.step.stall_guard import MOST_STEPS, NothingLearned, StallGuard
from slipstream.replay.records.ticket import Group
from tests.learner.lead.test_report import STEP
from tests.replay.records.attempts import group_earning

LEARNED = dataclasses.replace(STEP, grad_norm=0.5, skipped=False)
EMPTY = dataclasses.replace(STEP, grad_norm=0.0, skipped=False)
SKIPPED = dataclasses.replace(STEP, grad_norm=float("nan"), skipped=True)
HOPELESS, STUCK, SOLVED = [group_earning(0.0, 0.0)], [group_earning(0.5, 0.5)], [group_earning(1.0, 1.0)]


def test_a_hundred_steps_in_a_row_without_a_change_end_the_run_with_both_reasons() -> None:
    stall_guard = StallGuard()
    stall_guard.after(1, LEARNED, SOLVED)
    for step in range(2, 62):
        stall_guard.after(step, EMPTY, HOPELESS)
    for step in range(62, 101):
        stall_guard.after(step, SKIPPED, HOPELESS)
    with pytest.raises(NothingLearned) as error:
        stall_guard.after(101, SKIPPED, HOPELESS)
    said = str(error.value)
    assert said.startswith(
        "step 101: the last 100 steps changed nothing; the norm of the gradient was 0 in 60, with a mean return of 0 "
        "and 0% successes: look at"
    )
    assert "no episode earns anything: use a warm start, easier tasks or partial rewards; 40 were skipped" in said
    assert "40 were skipped, because the gradient was not finite or the guard refused it: lower `optim.lr`" in said


def one_short(groups: list[Group]) -> StallGuard:
    """A guard after all but one of the steps without a gradient that end a run."""
    stall_guard = StallGuard()
    for step in range(1, MOST_STEPS):
        stall_guard.after(step, EMPTY, groups)
    return stall_guard


def test_siblings_that_always_earn_the_same_are_another_reason_than_hopeless_tasks() -> None:
    stall_guard = one_short(STUCK)
    with pytest.raises(NothingLearned, match=r"mean return of 0\.5 and 0% successes: .*; siblings earn the same: use"):
        stall_guard.after(MOST_STEPS, EMPTY, STUCK)


def test_solved_tasks_end_the_run_as_finished() -> None:
    stall_guard = one_short(SOLVED)
    assert not stall_guard.is_solved
    stall_guard.after(MOST_STEPS, EMPTY, SOLVED)
    assert stall_guard.is_solved


def test_steps_that_were_skipped_are_no_sign_of_solved_tasks() -> None:
    stall_guard = one_short(SOLVED)
    with pytest.raises(NothingLearned, match="1 were skipped"):
        stall_guard.after(MOST_STEPS, SKIPPED, SOLVED)


def test_one_step_that_changes_something_begins_the_count_again() -> None:
    stall_guard = StallGuard()
    for step in range(3 * MOST_STEPS):
        stall_guard.after(step, LEARNED if step % (MOST_STEPS - 1) == 0 else EMPTY, STUCK)
