"""What all processes of a run have spent on its judges, in Redis, so that a budget is one of the whole run."""

import logging
import math

import redis

from slipstream.replay.records.keys import key
from slipstream.replay.records.records import write_over
from slipstream.replay.records.scripts import is_damage

log = logging.getLogger(__name__)

Amounts = tuple[int, int, float]  # requests, tokens, money


class JudgeAccount:
    """The account of each judge of one run. Threads may share it.

    It is kept with the run, over restarts. If a reply of the server is lost, an amount may count twice, never less.
    """

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._name = key(run_id, "judge:spent")

    def add(self, judge: str, requests: int, tokens: int, cost: float) -> Amounts:
        """Add what was spent on `judge`, a key of the configuration, and return the sums of the whole run.

        Sums that are no numbers start again at 0, with an error in the log.
        """
        try:
            sums = self._add(judge, requests, tokens, cost)
            if math.isfinite(sums[2]):
                return sums
            why = f"money is {sums[2]}"
        except redis.ResponseError as error:
            if not is_damage(error):
                raise
            why = str(error)
        log.error("%s: what %s has spent was not a number, and counts again from 0: %s", self._name, judge, why)
        self._client.hdel(self._name, *_fields(judge))
        return self._add(judge, requests, tokens, cost)

    def _add(self, judge: str, requests: int, tokens: int, cost: float) -> Amounts:
        first, second, third = _fields(judge)

        def together() -> Amounts:
            with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hincrby(self._name, first, requests)
                pipeline.hincrby(self._name, second, tokens)
                pipeline.hincrbyfloat(self._name, third, cost)
                sums = pipeline.execute()
            return int(sums[0]), int(sums[1]), float(sums[2])

        found: Amounts = write_over(self._client, together, kinds={self._name: "hash"})
        return found


def _fields(judge: str) -> tuple[str, str, str]:
    return f"{judge} requests", f"{judge} tokens", f"{judge} cost"
