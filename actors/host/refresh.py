"""Keeps an engine's weights up to date: watches the offers, stages in the background, commits at a token boundary."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from slipstream.actors.engine.engine import Engine, EngineSpoiled
from slipstream.actors.host.pin import Pin
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.common.transfer.weights import Offer
from slipstream.replay.fleet.fleet import Refusal
from slipstream.replay.records.failures import cut_reason

WAIT_S = 0.5  # for an offer, in one request: less than an actor that must leave has time for
PINNED_POLL_S = 0.05  # how often it is seen whether an evaluation still pins the engine
RETRY_S = 1.0  # after a first refusal; doubled with each further one, up to
MAX_RETRY_S = 30.0
MAX_TRIES = 3  # of a version that does not fit: then only a newer one is tried

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RefreshCounts:
    """The counters of refreshes."""

    num_committed: int = 0
    last_pause_s: float = 0.0
    refusal: Refusal | None = None  # of the version that was tried last; None if it serves


@dataclass(kw_only=True, slots=True)
class Tries:
    """When to try which version again after refusals."""

    in_a_row: int = 0  # refusals since the last commit, of whatever version
    unfit_version: int = -1  # the last that did not fit
    num_unfit: int = 0  # how often it did not

    def given_up(self) -> int:
        """The version that is not tried again, or -1."""
        return self.unfit_version if self.num_unfit >= MAX_TRIES else -1

    def refused(self, policy_version: int, *, unfit: bool) -> float:
        """Count a refusal; return the seconds to wait."""
        self.in_a_row += 1
        if unfit:
            self.num_unfit = 1 + (self.num_unfit if policy_version == self.unfit_version else 0)
            self.unfit_version = policy_version
        return min(MAX_RETRY_S, RETRY_S * 2.0 ** (self.in_a_row - 1))


class Later(Protocol):
    """Returns the newest offer, as soon as its version is above the given one; None if `wait_s` passes first."""

    def __call__(self, policy_version: int, *, wait_s: float) -> Offer | None: ...


async def keep_fresh(engine: Engine, later: Later, counts: RefreshCounts, pin: Pin, interval: PollInterval) -> None:
    """Refresh `engine` for as long as this runs.

    Consumes the newest offer; waits in `later` until there is one, and, before the commit, until no evaluation pins the
    engine; produces commits. If a version is refused, the old weights keep serving, and the refusal is in `counts`
    until a version serves. What did not arrive is tried again, ever less often; what does not fit, or fails its probe,
    is tried MAX_TRIES times. Raises EngineDied.
    """
    staged, tries = -1, Tries()
    while True:
        wait_s = 0.0 if staged > engine.policy_version else interval.seconds(WAIT_S)
        known = max(staged, engine.policy_version, tries.given_up())
        offer = await asyncio.to_thread(later, known, wait_s=wait_s)
        if offer is not None:
            version, staged = offer.manifest.policy_version, -1
            try:
                await engine.stage(offer)
                staged = version
            except WeightsRefused as error:
                await _refused(error, engine, version, counts, pin, tries)
                continue
        if staged <= engine.policy_version:
            continue
        if pin.held:
            await asyncio.sleep(interval.seconds(PINNED_POLL_S))
            continue
        version, staged = staged, -1
        try:
            with pin.committing():
                counts.last_pause_s = await engine.commit(version)
        except WeightsUnfit as error:
            await _refused(error, engine, version, counts, pin, tries)
            continue
        except EngineSpoiled as error:
            counts.refusal = Refusal(policy_version=version, reason=cut_reason(str(error)), unfit=True)
            raise
        counts.num_committed += 1
        counts.refusal, pin.stuck, tries = None, False, Tries()
        log.info("serving version %d after a pause of %.1f ms", version, 1e3 * counts.last_pause_s)


async def _refused(
    error: WeightsRefused, engine: Engine, version: int, counts: RefreshCounts, pin: Pin, tries: Tries
) -> None:
    """Report a refusal, and wait before the next attempt."""
    unfit = isinstance(error, WeightsUnfit)
    wait_s = tries.refused(version, unfit=unfit)
    counts.refusal = Refusal(policy_version=version, reason=cut_reason(str(error)), unfit=unfit)
    pin.stuck = True
    again = f"trying again in {wait_s:.0f} s" if version > tries.given_up() else "waiting for a newer version"
    log.warning("version %d refused; the engine keeps version %d; %s: %s", version, engine.policy_version, again, error)
    await asyncio.sleep(wait_s)
