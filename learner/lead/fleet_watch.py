"""Shows fleet, buffer and diagnosis by the wall clock: they change also while the learner makes no step."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis

from slipstream.common.config.config import Config
from slipstream.common.process.events import Events
from slipstream.common.process.metrics import Metrics
from slipstream.common.process.printable import printable
from slipstream.learner.lead.connections import Connections
from slipstream.learner.lead.cost import cost_of
from slipstream.learner.lead.overview import FLEET, describe
from slipstream.learner.lead.report import add_cost, add_fleet
from slipstream.replay.run.diagnosis import Diagnosis, FaultLog, diagnose
from slipstream.replay.run.observer import Observer

EVERY_S = 10.0

log = logging.getLogger(__name__)


class FleetWatch:
    """A thread that looks at the run every EVERY_S.

    It writes a point for each chart, whose "step" is the seconds since the run began. It writes the diagnosis as text
    when the cause changes, and logs faults that last.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        tensorboard: Path,
        *,
        started_at_s: float,
        tokens_trained: Callable[[], int],
        steps: Callable[[], Sequence[Mapping[str, float]]],
    ) -> None:
        """`steps` gives the records of the newest optimizer steps."""
        self.found: Diagnosis | None = None  # at the last look
        self._observer = Observer(connections.client, config)
        self._started_at_s = started_at_s
        self._tokens_trained = tokens_trained
        self._steps = steps
        self._faults = FaultLog()
        self._events = Events(tensorboard / FLEET, describe=describe)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look a last time, and end the thread."""
        self._ending.set()
        self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        """Waits for the clock alone; it is unblocked by `close`. A server that is away leaves a gap in the charts."""
        while True:
            ending = self._ending.wait(EVERY_S)
            try:
                self._look(time.time())
            except (redis.RedisError, OSError) as error:
                log.warning("no point for the fleet's charts: %s", error)
            if ending:
                return

    def _look(self, now_s: float) -> None:
        facts = self._observer.facts(self._steps())
        metrics, found, tokens = Metrics(), diagnose(facts), self._tokens_trained()
        add_fleet(metrics, ledger=facts.ledger, actors=facts.census.alive)
        add_cost(metrics, cost_of(facts.census, ledger=facts.ledger, tokens_trained=tokens))
        if line := self._faults.line(found, now_s=now_s):
            log.warning("%s", printable(line))
        is_new = self.found is None or found.cause != self.found.cause
        self.found = found
        texts = {"diagnosis": _text(found)} if is_new else {}
        self._events.write(round(now_s - self._started_at_s), metrics.means(), texts=texts, time_s=now_s)


def _text(found: Diagnosis) -> str:
    return (
        f"{'FAULT' if found.is_fault else 'no fault'}: {found.cause}\n"
        f"evidence: {found.evidence}\nnext step: {found.next_step}"
    )
