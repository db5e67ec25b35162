"""Watches which actors refuse the published weights: logs each refusal once, and ends a run that all actors refuse."""

import logging
import time
from collections.abc import Callable, Sequence

from slipstream.common.process.printable import printable
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, Member

LOOK_S = 1.0
REFUSED_S = 15.0  # longer than an actor's attempts at one version, and than its heartbeat

log = logging.getLogger(__name__)


class AllRefuse(RuntimeError):
    """Every live actor has refused the newest version for good: nothing can be learned any more."""


class Refusals:
    """The refusals of one run, as its actors report them in their heartbeats."""

    def __init__(self, fleet: Fleet, bulletin: Bulletin, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._bulletin = bulletin
        self._clock = clock
        self._looked_at = -LOOK_S
        self._since: float | None = None  # when all actors were first seen to refuse
        self._logged: dict[str, int] = {}  # the last version whose refusal was logged, by actor

    def log_new(self, members: Sequence[Member]) -> int:
        """Log refusals that were not logged yet; return how many of `members` refuse a version."""
        refusing = [member for member in members if member.refusal]
        for member in refusing:
            if member.refusal and self._logged.get(member.name) != member.refusal.policy_version:
                self._logged[member.name] = member.refusal.policy_version
                log.warning("actor %s: %s", printable(member.name), printable(member.refusal.reason))
        return len(refusing)

    def check(self) -> None:
        """Look again if LOOK_S have passed; called while the learner waits for actors.

        Raises AllRefuse if, for REFUSED_S, each live actor has refused the newest version because it does not fit or
        failed its probe. Weights that did not arrive are no reason to end: the network may come back.
        """
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        actors = self._fleet.members()
        self.log_new(actors)
        newest = self._bulletin.highest_version()
        if not actors or not all(_refuses(actor, newest) for actor in actors):
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= REFUSED_S:
            raise AllRefuse(
                f"all {len(actors)} actors have refused version {newest}, the newest, for {REFUSED_S:.0f} s; "
                f"{self.last_reason()}"
            )

    def last_reason(self) -> str:
        """Why an actor refuses the newest version, alive or not; empty if none does."""
        newest = self._bulletin.highest_version()
        for member in self._fleet.everyone():
            if member.refusal and member.refusal.policy_version >= newest:
                return f"{printable(member.name)}: {printable(member.refusal.reason)}"
        return ""


def _refuses(actor: Member, newest: int) -> bool:
    return actor.refusal is not None and actor.refusal.unfit and actor.refusal.policy_version >= newest
