"""Keeps an engine at its policy version while it plays evaluations."""

import contextlib
import time
from collections.abc import Iterator

SKIP_S = 1.0


class Pin:
    """Prevents that new weights are committed while an evaluation is leased or played.

    After its first evaluation group, an actor's engine keeps its version until no more evaluation groups are available
    and the last one has ended. Meanwhile newer weights are staged, and training episodes continue with the old version.
    """

    def __init__(self) -> None:
        self.num_groups = 0  # evaluation groups being played
        self._more = False  # the last lease was granted, so there may be more
        self._leasing = False
        self._committing = False
        self._skipped_version: int | None = None  # the engine's version when a queued evaluation wanted another one
        self._ask_again_at = 0.0  # until then, evaluations are not asked for with that version
        self.stuck = True  # no weights have arrived yet, or the last ones were refused
        self.asked_version = 0  # the oldest version that training groups accept, if this engine could not serve it

    @property
    def held(self) -> bool:
        """Whether the engine must keep its version."""
        return self._leasing or self._more or self.num_groups > 0

    @property
    def stays(self) -> bool:
        """Whether newer weights may take long: then groups that need them are left to other actors."""
        return self.held or self.stuck

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """A context for committing new weights, in which no evaluation is leased."""
        assert not self.held, "a commit while an evaluation is being played"
        self._committing = True
        try:
            yield
        finally:
            self._committing = False

    def may_lease(self, policy_version: int) -> bool:
        """Whether an engine at `policy_version` should ask for an evaluation group."""
        skips = self._skipped_version == policy_version and time.monotonic() < self._ask_again_at
        return not self._committing and not skips

    @contextlib.contextmanager
    def leasing(self) -> Iterator[None]:
        """A context for leasing an evaluation group, in which no weights are committed."""
        self._leasing = True
        try:
            yield
        finally:
            self._leasing = False

    def took(self) -> None:
        """Record that an evaluation group was leased and is being played."""
        self.num_groups += 1
        self._more = True

    def found_none(self) -> None:
        """Record that no evaluation group is queued."""
        self._more = False

    def skips(self, policy_version: int) -> None:
        """Record that the queued evaluation is of another version than this engine's, `policy_version`."""
        self._more = False
        self._skipped_version, self._ask_again_at = policy_version, time.monotonic() + SKIP_S

    def ended(self) -> None:
        """Record that an evaluation group has ended."""
        self.num_groups -= 1
