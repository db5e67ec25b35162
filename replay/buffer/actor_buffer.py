"""The buffer as an actor uses it: leases groups, renews the leases, and stores, fails or gives back their members.

`verbs` draws the states of a group. Payloads travel by plain SET and MGET (bulk.py).
"""

import itertools
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import WireError
from slipstream.common.records.trajectory import Outcome, Trajectory
from slipstream.replay.buffer.bulk import packed
from slipstream.replay.buffer.payloads import Entry, LostPayload, Payloads, record_of, result_of
from slipstream.replay.buffer.verbs import ACTORS, Verbs
from slipstream.replay.records.failures import DIED_TWICE, failed_attempt
from slipstream.replay.records.forks import awaited
from slipstream.replay.records.keys import key
from slipstream.replay.records.ticket import InsertResult, Lease, Ticket, decode_ticket

STORED = -1  # stands for the next attempt in the reply of `lease`
ORPHAN_TTL_S = 120  # a payload that its actor never committed expires after this

log = logging.getLogger(__name__)


class ActorBuffer:
    """One stream of groups of one run, for an actor. Threads may share it."""

    def __init__(
        self, client: redis.Redis, run_id: str, replay: ReplayConfig, *, vocab_size: int, stream: str = "train"
    ) -> None:
        self._lease_ttl_s, self._ttl_ms = replay.lease_ttl_s, round(1000 * replay.lease_ttl_s)
        self._base = key(run_id, stream)
        self._payloads = Payloads(client, self._base, run_id, replay, vocab_size=vocab_size)
        self._verbs = Verbs(client, run_id, self._base, ACTORS)

    def lease(self, actor: str) -> Lease | None:
        """Lease the oldest queued group to `actor`; None if no group is queued.

        A group with an unreadable ticket is set back, for the learner to drop. Then this returns None: call it again.
        """
        reply = self._verbs.call("lease", actor, uuid.uuid4().hex, self._ttl_ms)
        if reply is None:
            return None
        fence, encoded_ticket, group_id, num_members, num_queued, *rest = reply
        try:
            ticket = decode_ticket(encoded_ticket, int(group_id), num_members=num_members)
        except WireError as error:
            log.error(
                "group %s under %s has an unreadable ticket, and is left to the learner to drop: %s",
                group_id,
                self._base,
                error,
            )
            self._verbs.call("condemn", int(group_id), fence)
            return None
        rows = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
        missing = {member: attempt for member, attempt, _ in rows if attempt != STORED}
        return Lease(
            ticket=ticket,
            fence=int(fence),
            missing=missing,
            partials=self._read_partials(ticket, {member: record for member, _, record in rows if member in missing}),
            ttl_s=self._lease_ttl_s,
            num_queued=num_queued,
            stored=self._read_parents(ticket, {member: record for member, _, record in rows if member not in missing}),
        )

    def heartbeat(self, actor: str, leases: Iterable[Lease]) -> set[int]:
        """Renew the leases for `ttl_s` from now; return the group ids of those that are still valid."""
        rows = [(lease.ticket.group_id, lease.fence) for lease in leases]
        reply = self._verbs.call("heartbeat", actor, self._ttl_ms, *itertools.chain.from_iterable(rows))
        return {int(held) for held in reply}

    def insert(self, lease: Lease, trajectory: Trajectory) -> InsertResult:
        """Store one member of a leased group. Raises InvalidTrajectory before anything is sent.

        The payload is sent first, with a time to live, so that it expires unless the commit follows. It is sent with
        NX, so that a repeated insert cannot change a committed payload.
        """
        return self.insert_all([(lease, trajectory)])[0]

    def insert_all(self, attempts: Iterable[tuple[Lease, Trajectory]]) -> list[InsertResult]:
        """Store many members of leased groups, with several requests in flight.

        After an error the first of them may be stored; inserting all of them again is harmless.
        """
        return self._store("insert", attempts, Outcome.POLICY)

    def hand_in(self, lease: Lease, partial: Trajectory) -> InsertResult:
        """Store the whole turns of a preempted member of a leased group; the next lease continues from them.

        The member stays missing: `release` the lease next. Raises InvalidTrajectory before anything is sent, for
        example if the partial is not PREEMPTED or has no turn. It replaces a partial of an earlier lease.
        """
        return self._store("hand_in", [(lease, partial)], Outcome.PREEMPTED)[0]

    def fail(self, lease: Lease, member: int, *, attempt: int, outcome: Outcome, reason: str) -> int | None:
        """Report an attempt that failed for any reason other than the policy; return the number of the next attempt.

        None if there is no next attempt: the group is out of attempts and was dropped with the outcome as its reason,
        or the lease is lost, or the member is stored already. A partial of the member is discarded.
        """
        group_id = lease.ticket.group_id
        failure = failed_attempt(group_id, member, attempt=attempt, outcome=outcome.value, reason=reason)
        reply = self._verbs.call("fail", group_id, member, attempt, lease.fence, outcome.value, failure)
        return None if reply is None else int(reply)

    def release(self, lease: Lease, *, death: str = "") -> None:
        """Return the missing members to the queue at once: the actor is leaving, or its engine died, as `death` says.

        An attempt during which an engine died twice has failed: the next engine would sample the same tokens.
        """
        group_id, described = lease.ticket.group_id, b""
        if death:
            member, attempt = next(iter(lease.missing.items()))
            described = failed_attempt(
                group_id, member, attempt=attempt, outcome=Outcome.INFRA_FAILURE.value, reason=f"{DIED_TWICE}: {death}"
            )
        self._verbs.call("release", group_id, lease.fence, described)

    def _store(self, verb: str, attempts: Iterable[tuple[Lease, Trajectory]], outcome: Outcome) -> list[InsertResult]:
        sha = self._verbs.sha(verb)
        calls: list[tuple[tuple[str, ...], tuple[int | str, ...]]] = []

        def requests() -> Iterator[bytes]:
            for lease, trajectory in attempts:
                frame = self._payloads.encode(lease.ticket, trajectory, outcome=outcome)
                group_id, member = trajectory.group_id, trajectory.member
                name = self._payloads.name(group_id, member, trajectory.attempt, lease.fence, outcome=outcome)
                record = record_of(trajectory, fence=lease.fence, num_bytes=len(frame))
                keys = (self._base, name)
                arguments: tuple[int | str, ...] = (group_id, member, record, *result_of(trajectory))
                calls.append((keys, arguments))
                yield packed(
                    ("SET", name, frame, "EX", ORPHAN_TTL_S, "NX"), ("EVALSHA", sha, len(keys), *keys, *arguments)
                )

        replies = self._payloads.bulk.exchange(requests(), num_replies=2)
        return [self._stored(verb, *call, *reply) for call, reply in zip(calls, replies, strict=True)]

    def _stored(
        self, verb: str, keys: Sequence[str], arguments: Sequence[int | str], sent: Any, committed: Any
    ) -> InsertResult:
        if isinstance(committed, redis.ResponseError):
            committed = self._verbs.commit(verb, keys, arguments, committed)
        if isinstance(sent, Exception) and not isinstance(sent, redis.OutOfMemoryError):
            raise sent
        return InsertResult(committed.decode())

    def _read_parents(self, ticket: Ticket, records: dict[int, bytes]) -> dict[int, Trajectory]:
        """The stored members that others fork from. Without an unusable one, its forks begin at the start."""
        parents = {each for member, before in awaited(ticket).items() if member not in records for each in before}
        entries = [Entry(ticket, member, record) for member, record in records.items() if member in parents]
        found = self._payloads.read(entries, outcome=Outcome.POLICY)
        for entry, parent in zip(entries, found, strict=True):
            if not isinstance(parent, Trajectory):
                log.error("group %d: no member can fork from member %d: %s", ticket.group_id, entry.member, parent)
        return {parent.member: parent for parent in found if isinstance(parent, Trajectory)}

    def _read_partials(self, ticket: Ticket, records: dict[int, bytes]) -> dict[int, Trajectory]:
        """The partials by member. An unusable one is discarded, and its member starts from the beginning."""
        entries = [Entry(ticket, member, record) for member, record in records.items() if record]
        partials = {}
        for entry, partial in zip(entries, self._payloads.read(entries, outcome=Outcome.PREEMPTED), strict=True):
            if isinstance(partial, Trajectory):
                partials[entry.member] = partial
            else:
                why = "lost_payload" if isinstance(partial, LostPayload) else "poison"
                self._verbs.call("discard", ticket.group_id, entry.member, entry.record, why)
        return partials
