"""The buffer as people change it: groups are quarantined and requeued, and damaged books are repaired.

`verbs` draws the states of a group. To read, call the functions of `ledger`, `audit`, `listing` and `failures`.
"""

import uuid
from collections.abc import Iterable

import redis

from slipstream.replay.buffer.verbs import PEOPLES, Verbs, in_batches
from slipstream.replay.records.failures import Quarantined, cut_reason
from slipstream.replay.records.keys import key


class PeopleBuffer:
    """One stream of groups of one run, for people. They need no epoch, and fence out no learner."""

    def __init__(self, client: redis.Redis, run_id: str, *, stream: str = "train") -> None:
        self._verbs = Verbs(client, run_id, key(run_id, stream), PEOPLES)

    def quarantine(self, group_id: int, reason: str) -> bool:
        """Set a group aside unchanged, in any state, and return whether it is quarantined now. Its lease is lost.

        False if there is no such group, or if a model has learned from it: then it is retired. The learner quarantines
        groups with invalid payloads.
        """
        why = Quarantined(group_id=group_id, member=None, actor=None, reason=cut_reason(reason))
        return self._verbs.quarantine(why)

    def requeue(self, group_ids: Iterable[int]) -> int:
        """Queue groups again that are quarantined, leased, judging, or ready and never used; return how many.

        Their members are dropped as `requeued`, their leases are lost, and their attempts are counted from 0 again.
        """
        return sum(int(self._verbs.call("requeue", uuid.uuid4().hex, *batch)) for batch in in_batches(list(group_ids)))

    def repair(self, why: str) -> list[str]:
        """Make the books agree with what is stored, and return a line for each repair.

        Damaged groups are removed from Redis, and their trajectories are counted as `damaged`. Nothing else changes.
        """
        return self._verbs.repair(why)
