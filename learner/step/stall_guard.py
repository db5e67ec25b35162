"""Ends a run whose steps change nothing: a solved one as finished, any other with an error."""

import logging
from collections.abc import Sequence
from statistics import fmean

from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.equal_returns import Outlook, outlook

MOST_STEPS = 100

log = logging.getLogger(__name__)


class NothingLearned(RuntimeError):
    """`MOST_STEPS` steps in a row left the policy as it was, and its tasks are not solved; the message says why."""


class StallGuard:
    """Counts the steps in a row that had no gradient, or were skipped."""

    def __init__(self) -> None:
        self.is_solved = False
        self._num_without_gradient = 0
        self._num_skipped = 0
        self._returns, self._successes = list[float](), list[float]()  # means of the steps without a gradient

    def after(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Count `step`, in which the policy was to learn from `groups`.

        Sets `is_solved` if there is nothing left to learn. Raises NothingLearned.
        """
        if metrics.skipped:
            self._num_skipped += 1
        elif metrics.grad_norm == 0:
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            self._num_without_gradient += 1
            self._returns.append(fmean(trajectory.total_reward for trajectory in trajectories))
            self._successes.append(fmean(trajectory.success for trajectory in trajectories))
        else:
            self._num_skipped = self._num_without_gradient = 0
            self._returns, self._successes = [], []
        if self._num_skipped + self._num_without_gradient < MOST_STEPS:
            return
        if self._num_skipped or self._outlook() is not Outlook.SOLVED:
            raise NothingLearned(self._why(step))
        self.end_as_solved(step)

    def end_as_solved(self, step: int) -> None:
        """Note that the tasks are solved: the run is finished after `step`."""
        log.info("step %d: %s; the run ends as finished", step, Outlook.SOLVED.value)
        self.is_solved = True

    def _outlook(self) -> Outlook:
        return outlook(success=fmean(self._successes), mean_return=fmean(self._returns))

    def _why(self, step: int) -> str:
        reasons = []
        if self._num_without_gradient:
            reasons.append(
                f"the norm of the gradient was 0 in {self._num_without_gradient}, with a mean return of "
                f"{fmean(self._returns):.3g} and {fmean(self._successes):.0%} successes: look at the rewards with "
                f"`slipstream view`; {self._outlook().value}"
            )
        if self._num_skipped:
            reasons.append(
                f"{self._num_skipped} were skipped, because the gradient was not finite or the guard refused it: lower "
                "`optim.lr` or `replay.max_lag`"
            )
        return f"step {step}: the last {MOST_STEPS} steps changed nothing; {'; '.join(reasons)}"
