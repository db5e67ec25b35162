"""Keeps an engine's weights up to date: watches the offers, stages in the background, commits at a token boundary."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.engine import Engine, WeightsRefused
from actors.pin import Pin
from common.weights import Offer

POLL_S = 0.1
RETRY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RefreshCounts:
    """The counters of refreshes."""

    num_committed: int = 0
    num_refused: int = 0
    last_pause_s: float = 0.0


async def keep_fresh(engine: Engine, newest: Callable[[], Offer | None], counts: RefreshCounts, pin: Pin) -> None:
    """Refresh `engine` for as long as this runs.

    Consumes the newest offer, which `newest` reads; waits until it is newer than the engine's version, and, before the
    commit, until no evaluation pins the engine; produces commits. If an offer is refused, the old weights keep serving;
    the newest offer is tried after RETRY_S.
    """
    staged = -1
    while True:
        offer = await asyncio.to_thread(newest)
        if offer is not None and offer.manifest.policy_version > max(staged, engine.policy_version):
            version, staged = offer.manifest.policy_version, -1
            try:
                await engine.stage(offer)
            except WeightsRefused as error:
                counts.num_refused += 1
                pin.stuck = True
                log.warning(
                    "version %d refused; the engine keeps version %d: %s", version, engine.policy_version, error
                )
                await asyncio.sleep(RETRY_S)
                continue
            staged = version
        if staged <= engine.policy_version or pin.held:
            await asyncio.sleep(POLL_S)
            continue
        with pin.committing():
            counts.last_pause_s = await engine.commit(staged)
        counts.num_committed += 1
        pin.stuck = False
        log.info("serving version %d after a pause of %.1f ms", staged, 1e3 * counts.last_pause_s)


async def serving_version(engine: Engine, policy_version: int) -> None:
    """Wait until `engine` serves `policy_version` or a newer one."""
    while engine.policy_version < policy_version:  # noqa: ASYNC110 - the engine's thread changes it, without an event
        await asyncio.sleep(POLL_S / 2)
