"""Keeps an engine's weights up to date: watches the offers, stages in the background, commits at a token boundary."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engine import Engine, EngineSpoiled, WeightsRefused, WeightsUnfit
from actors.pace import Pace
from actors.pin import Pin
from common.weights import Offer
from replay.failures import cut_reason
from replay.fleet import Refusal

POLL_S, IDLE_POLL_S, MAX_POLL_S = 0.1, 0.02, 1.0
REST = 10  # asks pause for so many times the CPU of the last one: the offer of a mixture of experts names each expert
RETRY_S = 1.0  # after a first refusal; doubled with each further one, up to
MAX_RETRY_S = 30.0
MAX_TRIES = 3  # of a version that does not fit: then only a newer one is tried

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RefreshCounts:
    """The counters of refreshes."""

    num_committed: int = 0
    num_refused: int = 0
    last_pause_s: float = 0.0
    refusal: Refusal | None = None  # of the version that was tried last; None if it serves


@dataclass(kw_only=True, slots=True)
class Tries:
    """When to try which version again after refusals."""

    in_a_row: int = 0  # refusals since the last commit, of whatever version
    num_unfit: dict[int, int] = field(
        default_factory=dict
    )  # how often a version did not fit; of the newest version only

    def may_try(self, policy_version: int) -> bool:
        return self.num_unfit.get(policy_version, 0) < MAX_TRIES

    def refused(self, policy_version: int, *, unfit: bool) -> float:
        """Count a refusal; return the seconds to wait."""
        self.in_a_row += 1
        if unfit:
            self.num_unfit = {policy_version: self.num_unfit.get(policy_version, 0) + 1}
        return min(MAX_RETRY_S, RETRY_S * 2.0 ** (self.in_a_row - 1))

    def committed(self) -> None:
        self.in_a_row = 0
        self.num_unfit = {}


async def keep_fresh(
    engine: Engine, newest: Callable[[], Offer | None], counts: RefreshCounts, pin: Pin, pace: Pace
) -> None:
    """Refresh `engine` for as long as this runs.

    Consumes the newest offer, which `newest` reads; waits until it is newer than the engine's version, and, before the
    commit, until no evaluation pins the engine; produces commits. An idle engine asks more often: its groups may wait
    for these weights. If a version is refused, the old weights keep
    serving, and the refusal is in `counts` until a version serves. What did not arrive is tried again, ever less often;
    what does not fit, or fails its probe, is tried MAX_TRIES times. Raises EngineDied.
    """
    staged, tries = -1, Tries()
    while True:
        offer, cost_s = await asyncio.to_thread(_asked, newest)
        least_s = POLL_S if engine.load().num_running else IDLE_POLL_S
        pause_s = pace.every(min(MAX_POLL_S, max(least_s, REST * cost_s)))
        if offer is not None and offer.manifest.policy_version > max(staged, engine.policy_version):
            version, staged = offer.manifest.policy_version, -1
            if tries.may_try(version):
                try:
                    await engine.stage(offer)
                    staged = version
                except WeightsRefused as error:
                    await _refused(error, engine, version, counts, pin, tries)
                    continue
        if staged <= engine.policy_version or pin.held:
            await asyncio.sleep(pause_s)
            continue
        version, staged = staged, -1
        try:
            with pin.committing():
                counts.last_pause_s = await engine.commit(version)
        except WeightsUnfit as error:
            await _refused(error, engine, version, counts, pin, tries)
            continue
        except EngineSpoiled as error:
            counts.num_refused += 1
            counts.refusal = Refusal(policy_version=version, reason=cut_reason(str(error)), unfit=True)
            raise
        counts.num_committed += 1
        counts.refusal, pin.stuck = None, False
        tries.committed()
        log.info("serving version %d after a pause of %.1f ms", version, 1e3 * counts.last_pause_s)


def _asked(newest: Callable[[], Offer | None]) -> tuple[Offer | None, float]:
    """The newest offer, and the CPU seconds of reading it."""
    begun = time.thread_time()
    return newest(), time.thread_time() - begun


async def _refused(
    error: WeightsRefused, engine: Engine, version: int, counts: RefreshCounts, pin: Pin, tries: Tries
) -> None:
    """Report a refusal, and wait before the next attempt."""
    unfit = isinstance(error, WeightsUnfit)
    wait_s = tries.refused(version, unfit=unfit)
    counts.num_refused += 1
    counts.refusal = Refusal(policy_version=version, reason=cut_reason(str(error)), unfit=unfit)
    pin.stuck = True
    again = f"trying again in {wait_s:.0f} s" if tries.may_try(version) else "waiting for a newer version"
    log.warning("version %d refused; the engine keeps version %d; %s: %s", version, engine.policy_version, again, error)
    await asyncio.sleep(wait_s)
