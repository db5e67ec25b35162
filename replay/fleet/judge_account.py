"""What all processes of a run have spent on its judges, in Redis, so that a budget is one of the whole run."""

import logging

import redis

from slipstream.replay.records import scripts
from slipstream.replay.records.keys import key

log = logging.getLogger(__name__)

Amounts = tuple[int, int, float]  # requests, tokens, money


class JudgeAccount:
    """The account of each judge of one run. Threads may share it.

    It is kept with the run, over restarts. If a reply of the server is lost, an amount may count twice, never less.
    It cannot be reset while a process of the run lives: each adds to the largest sums that it has seen.
    """

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._name = key(run_id, "judge:spent")
        self._spend = scripts.load(client, "spend")
        self._known: dict[str, Amounts] = {}  # by judge

    def add(self, judge: str, requests: int, tokens: int, cost: float) -> Amounts:
        """Add what was spent on `judge`, a key of the configuration, and return the sums of the whole run.

        Sums that are no numbers, or smaller than before, are replaced, with an error in the log.
        """
        known = self._known.get(judge, (0, 0, 0.0))
        *sums, flaw = self._spend(keys=[self._name], args=[judge, requests, tokens, cost, *known])
        if flaw:
            log.error("%s: %s; it counts on from %s", self._name, flaw.decode(errors="replace"), known)
        self._known[judge] = int(sums[0]), int(sums[1]), float(sums[2])
        return self._known[judge]
