"""Ends a run whose steps change nothing."""

from learner.step_metrics import StepMetrics

MOST_STEPS = 100


class NothingLearned(RuntimeError):
    """`MOST_STEPS` steps in a row left the policy as it was; the message says why."""


class Standstill:
    """Counts the steps in a row that had no gradient, or were skipped."""

    def __init__(self) -> None:
        self._num_without_gradient = 0
        self._num_skipped = 0

    def after(self, step: int, metrics: StepMetrics) -> None:
        """Count `step`, in which the policy was to learn. Raises NothingLearned."""
        if metrics.skipped:
            self._num_skipped += 1
        elif metrics.grad_norm == 0:
            self._num_without_gradient += 1
        else:
            self._num_skipped = self._num_without_gradient = 0
        if self._num_skipped + self._num_without_gradient >= MOST_STEPS:
            raise NothingLearned(self._why(step))

    def _why(self, step: int) -> str:
        reasons = []
        if self._num_without_gradient:
            reasons.append(
                f"the norm of the gradient was 0 in {self._num_without_gradient}: look at the rewards with `slipstream "
                "replay diff STEP`; use a warm start, easier tasks or partial rewards"
            )
        if self._num_skipped:
            reasons.append(
                f"{self._num_skipped} were skipped, because the gradient was not finite or the guard refused it: lower "
                "`optim.lr` or `replay.max_lag`"
            )
        return f"step {step}: the last {MOST_STEPS} steps changed nothing; {'; '.join(reasons)}"
