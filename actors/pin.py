"""An engine that keeps its policy version while an evaluation is played on it."""

import contextlib
import time
from collections.abc import Iterator

PASS_OVER_S = 1.0


class Pin:
    """Between those who play evaluations and the one who commits new weights: never both at once.

    From its first evaluation group on, an actor's engine stays as it is until no more of them can be had and the last
    is over. Newer weights are staged meanwhile; training episodes go on, with the version that is there.
    """

    def __init__(self) -> None:
        self._num_groups = 0  # evaluation groups being played
        self._more = False  # the last lease was granted, so the next may be
        self._leasing = False
        self._committing = False
        self._passed_over: int | None = None  # the version of this engine that a queued evaluation did not ask for
        self._ask_again_at = 0.0  # that one may be gone by then, and the next ask for just this version
        self.stuck = True  # no weights have come yet, or the last were refused
        self.asked_version = 0  # the oldest that training groups ask for, where that was too new for one that stays

    @property
    def held(self) -> bool:
        """Whether the engine has to stay as it is."""
        return self._leasing or self._more or self._num_groups > 0

    @property
    def stays(self) -> bool:
        """Whether newer weights may be long in coming: groups that ask for them are for other actors."""
        return self.held or self.stuck

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """While new weights are committed, no evaluation is leased."""
        assert not self.held, "a commit while an evaluation is being played"
        self._committing = True
        try:
            yield
        finally:
            self._committing = False

    def may_lease(self, policy_version: int) -> bool:
        """Whether an engine at `policy_version` should ask for an evaluation group."""
        passes_over = self._passed_over == policy_version and time.monotonic() < self._ask_again_at
        return not self._committing and not passes_over

    @contextlib.contextmanager
    def leasing(self) -> Iterator[None]:
        """While an evaluation group is asked for, nothing is committed."""
        self._leasing = True
        try:
            yield
        finally:
            self._leasing = False

    def took(self) -> None:
        """An evaluation group is being played."""
        self._num_groups += 1
        self._more = True

    def found_none(self) -> None:
        """None is queued."""
        self._more = False

    def passes_over(self, policy_version: int) -> None:
        """What is queued is of another version than this engine's, `policy_version`."""
        self._more = False
        self._passed_over, self._ask_again_at = policy_version, time.monotonic() + PASS_OVER_S

    def ended(self) -> None:
        """An evaluation group is over."""
        self._num_groups -= 1
