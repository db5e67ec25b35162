"""Shows fleet and buffer in TensorBoard by the wall clock: their charts move also while the learner makes no step."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis

from common.events import Events
from common.metrics import Metrics
from common.patience import RedisAway
from learner.cost import cost_of
from learner.links import Links
from learner.overview import FLEET, PINNED
from learner.report import add_cost, add_fleet

EVERY_S = 10.0

log = logging.getLogger(__name__)


class FleetWatch:
    """A thread that writes a point for each chart every EVERY_S; its "step" is the seconds since the run began."""

    def __init__(
        self, links: Links, tensorboard: Path, *, started_at_s: float, tokens_trained: Callable[[], int]
    ) -> None:
        self._links = links
        self._started_at_s = started_at_s
        self._tokens_trained = tokens_trained
        self._events = Events(tensorboard / FLEET, descriptions=PINNED)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last point, and end the thread."""
        self._ending.set()
        self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        """Waits for the clock alone; it is unblocked by `close`. A server that is away leaves a gap in the charts."""
        while True:
            ending = self._ending.wait(EVERY_S)
            try:
                self._write(time.time())
            except (RedisAway, redis.RedisError, OSError) as error:
                log.warning("no point for the fleet's charts: %s", error)
            if ending:
                return

    def _write(self, now_s: float) -> None:
        metrics = fleet_metrics(self._links, tokens_trained=self._tokens_trained())
        self._events.write(round(now_s - self._started_at_s), metrics.means(), time_s=now_s)


def fleet_metrics(links: Links, *, tokens_trained: int) -> Metrics:
    """The state of the buffer, of the fleet, and its cost, as they are now."""
    metrics = Metrics()
    ledger, members = links.shards.ledger(), links.fleet.members()
    add_fleet(metrics, ledger=ledger, members=members)
    everyone = links.fleet.everyone()
    add_cost(metrics, cost_of(everyone, alive=members, ledger=ledger, tokens_trained=tokens_trained))
    return metrics
