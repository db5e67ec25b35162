"""Whether actors may begin groups by weights that are about to be replaced, because the learner waits for groups."""

MAX_QUIET = 8  # steps


class Haste:
    """Hurries after a step that waited for its batch, until as many steps in a row as needed had theirs at once.

    Each wait doubles that number, and twice as many steps without a wait halve it. So a learner that is the limit gets
    groups by the newest weights, and one that such groups would keep waiting waits for them in at most one of some
    steps.
    """

    def __init__(self) -> None:
        self._needed = 1
        self._quiet = 0  # steps in a row without a wait

    def __bool__(self) -> bool:
        return self._quiet < self._needed

    def after_step(self, *, waited: bool) -> None:
        """Add a step: did it have to wait for its batch?"""
        if waited:
            self._quiet, self._needed = 0, min(2 * self._needed, MAX_QUIET)
            return
        self._quiet += 1
        if self._quiet >= 2 * self._needed:
            self._needed = max(1, self._needed // 2)
            self._quiet = self._needed
