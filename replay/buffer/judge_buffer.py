"""The buffer as a judge uses it: leases complete groups, renews the leases, and stores or fails their judging.

`verbs` draws the states of a group. A group whose ticket says `is_judged` becomes ready with its verdict.
"""

import itertools
import logging
import uuid
from collections.abc import Iterable

import msgspec
import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import WireError, encode
from slipstream.common.records.trajectory import Outcome, Trajectory
from slipstream.replay.buffer.payloads import Entry, Payloads
from slipstream.replay.buffer.verbs import JUDGES, Verbs
from slipstream.replay.records.failures import failed_attempt
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult, Ticket, Verdict, decode_ticket

JUDGE_FAILED = "judge_failed"  # the outcome of a judging that failed, and the reason of a drop

log = logging.getLogger(__name__)


class Judging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to judge one group; it expires `replay.lease_ttl_s` after the last renewal."""

    ticket: Ticket
    fence: int  # larger than the fence of any earlier lease; verdicts under an older one are refused
    num_judgings: int  # that failed before
    trajectories: list[Trajectory]  # all members, in order


class JudgeBuffer:
    """The training groups of one run, for a judge. Threads may share it."""

    def __init__(self, client: redis.Redis, run_id: str, replay: ReplayConfig, *, vocab_size: int) -> None:
        self._ttl_ms = round(1000 * replay.lease_ttl_s)
        self._base = key(run_id, "train")
        self._payloads = Payloads(client, self._base, run_id, replay, vocab_size=vocab_size)
        self._verbs = Verbs(client, run_id, self._base, JUDGES)

    def lease(self, judge: str) -> Judging | None:
        """Lease the group that has waited longest; None if no group waits.

        A group that cannot be read becomes ready without marks, so that the learner meets what is wrong at its claim:
        it drops the group, or quarantines it with the sender. Then this returns None: call it again.
        """
        reply = self._verbs.call("lease_judging", judge, uuid.uuid4().hex, self._ttl_ms)
        if reply is None:
            return None
        fence, encoded_ticket, group_id, num_judgings, *records = reply
        try:
            ticket = decode_ticket(encoded_ticket, int(group_id), num_members=len(records))
            entries = [Entry(ticket, *member) for member in enumerate(records)]
            found = self._payloads.read(entries, outcome=Outcome.POLICY)
        except WireError as error:
            found = [error]
        trajectories = [each for each in found if isinstance(each, Trajectory)]
        if len(trajectories) < len(found):
            why = next(each for each in found if not isinstance(each, Trajectory))
            log.error("group %d under %s cannot be judged; the learner gives it up: %s", int(group_id), self._base, why)
            self._verbs.call("judged", int(group_id), int(fence), encode(Verdict(judge=judge, members=[])))
            return None
        return Judging(ticket=ticket, fence=int(fence), num_judgings=num_judgings, trajectories=trajectories)

    def renew(self, judge: str, judgings: Iterable[Judging]) -> set[int]:
        """Renew the leases from now; return the group ids of those that are still valid."""
        rows = [(judging.ticket.group_id, judging.fence) for judging in judgings]
        reply = self._verbs.call("renew_judging", judge, self._ttl_ms, *itertools.chain.from_iterable(rows))
        return {int(held) for held in reply}

    def store(self, judging: Judging, verdict: Verdict) -> InsertResult:
        """Store the verdict on a leased group, which becomes ready."""
        group_id = judging.ticket.group_id
        return InsertResult(self._verbs.call("judged", group_id, judging.fence, encode(verdict)).decode())

    def fail(self, judging: Judging, *, wait_s: float, reason: str) -> bool:
        """Report that the judging failed; return whether the group will be judged again, after `wait_s`.

        Otherwise it was dropped as `judge_failed`, after `replay.max_attempts`, or the lease is lost.
        """
        group_id = judging.ticket.group_id
        failure = failed_attempt(group_id, 0, attempt=judging.num_judgings, outcome=JUDGE_FAILED, reason=reason)
        return bool(self._verbs.call("fail_judging", group_id, judging.fence, round(1000 * wait_s), failure))

    def release(self, judging: Judging) -> None:
        """Give the group back at once: the judge is leaving."""
        self._verbs.call("release_judging", judging.ticket.group_id, judging.fence)
