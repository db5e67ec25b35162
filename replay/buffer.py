"""The trajectory buffer: a state machine in Redis, in which every group is in exactly one state.

                                             claim, uses left
                                                   +--+
                                                   v  |
    open --> queued --lease--> leased --finished--> ready --claim(step)--> claimed --settle(step)--> trained
               ^                | |                 ^ |                    ^  |
               +--- release ----+ |                 +----- reopen(step) -------+
               +--- expired ------+                   |                    |
               |                  |                   +- too old, and used-+
               |           out of attempts            |
               |                  |                too old
               |                  v                   v
               |               dropped  <-----  drop, from any state
               |                  ^
               |                  +--- more than MAX_QUARANTINED
               |                                 |
               +---- requeue -------------- quarantined  <--  poison, or a person's wish, from any state
                   (leased, ready too)

A group that a model learned from is never counted as dropped: it is retired, that is claimed for the step of its last
use, and trained with it. A leased group may hold partials: what a preempted actor handed in of a missing member, given
out with the next lease.

Each verb is one small Lua script that runs whole or not at all and may be run again: a client that lost the reply sends
the same call once more, and it has one effect. Time is the server's. Payloads travel by plain SET and MGET (bulk.py).
"""

import itertools
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import redis

from common.trajectory import Outcome, Trajectory
from common.wire import decode, encode
from replay import scripts
from replay.audit import audit
from replay.bulk import packed
from replay.keys import FencedOut, RunForgotten, key, shard_name
from replay.ledger import Ledger, read_ledger
from replay.payloads import Entry, LostPayload, Payloads, Unusable, record_of, sender_of
from replay.sampler import ONCE, Order, Reuse
from replay.ticket import Failure, Group, InsertResult, Lease, Quarantined, Ticket

REQUEST_TTL_S = 1000  # how long the server knows an acquired epoch from a new request: no network holds one longer
ORPHAN_TTL_S = 120  # a payload whose actor died before the commit is gone after this
BATCH_GROUPS = 256  # the most that one run of a script opens, drops, settles or reopens, so that others get a turn
MAX_QUARANTINED = 16
NO_STEP = 1 << 53  # later than any: no use is taken back
MAX_REASON_CHARS = 2000  # of a failure: an environment's error may quote all that it read
VERBS = (
    "acquire_epoch", "open", "claim", "prioritise", "drop", "settle", "reopen",
    "lease", "heartbeat", "insert", "hand_in", "discard", "fail", "release",
    "quarantine", "requeue",
)  # fmt: skip

T = TypeVar("T")


class Buffer:
    """One stream of groups of one run, or a shard of it. Threads may share it."""

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        *,
        vocab_size: int,
        lease_ttl_s: float,
        max_attempts: int,
        max_trajectory_bytes: int,
        stream: str = "train",
        shard: int = 0,
        compress: bool = False,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._shard_name = shard_name(run_id, shard)
        self._lease_ttl_s = lease_ttl_s
        self._max_attempts = max_attempts
        self._stream = stream
        self._base = key(self._shard_name, stream)
        self._counters = key(self._shard_name, stream, "counters")
        self._payloads = Payloads(
            client,
            self._base,
            run_id,
            vocab_size=vocab_size,
            max_bytes=max_trajectory_bytes,
            compress=compress,
        )
        self._scripts = {verb: scripts.load(client, "prelude", "begin", verb) for verb in VERBS}
        self._epoch = 0
        self._num_claims = 0
        self._last_step_made = NO_STEP  # before the one that groups are claimed for now

    # --- The learner's verbs. Each carries its epoch, and raises FencedOut once a newer learner has acquired one.

    def acquire_epoch(self) -> int:
        """Become the run's learner: every earlier one is fenced out. Call it once, before the other verbs."""
        self._epoch = int(self._call("acquire_epoch", uuid.uuid4().hex, REQUEST_TTL_S))
        return self._epoch

    def adopt_epoch(self, epoch: int) -> None:
        """Act as the learner that acquired `epoch` through the buffer of another stream.

        One buffer a stream may: it numbers its claims, and those of an epoch must rise.
        """
        self._epoch = epoch

    def open(self, tickets: Iterable[Ticket]) -> int:
        """Queue the tickets, in rising order of group_id; return how many were new.

        An id at or below the highest ever opened is known already and changes nothing.
        """
        rows = [(ticket.group_id, ticket.num_members, encode(ticket)) for ticket in tickets]
        group_ids = [group_id for group_id, _, _ in rows]
        if group_ids != sorted(set(group_ids)):
            raise ValueError(f"tickets must come in rising order of group_id, got {group_ids}; sort them")
        return sum(
            int(self._call("open", self._epoch, self._max_attempts, *itertools.chain.from_iterable(batch)))
            for batch in _batches(rows)
        )

    def claim(
        self,
        step: int,
        num_groups: int,
        *,
        policy_version: int,
        max_lag: int,
        order: Order = Order.OLDEST,
        seed: int = 0,
        reuse: Reuse = ONCE,
    ) -> list[Group]:
        """Take the first `num_groups` ready groups in `order`, for `step`; [] while there are fewer or `reuse` says no.

        A group with uses left stays ready, for later steps. Ready groups with a token more than `max_lag` versions
        older than `policy_version` are dropped first, as `too_old`. Groups with a payload that turns out to be no valid
        trajectory are quarantined, those that lost one are dropped, and both are missing from the answer: claim again
        for the rest of the batch, as after a drop.
        """
        self._last_step_made = step - 1
        arguments = (
            self._epoch, self._num_claims, step, num_groups, policy_version - max_lag, order.value,
            seed, reuse.max_uses, reuse.samples_per_insert, reuse.error_buffer,
        )  # fmt: skip
        reply = None
        while reply is None:
            reply = self._call("claim", *arguments)
        groups = self._read_groups(reply)
        # Only now: a claim that raised on its way is the same claim when the learner tries again, and not one whose
        # groups nobody ever saw.
        self._num_claims += 1
        return groups

    def prioritise(self, scores: Mapping[int, float]) -> None:
        """Give ready groups, by id, the scores that `Order.PRIORITISED` goes by. Raises ValueError for NaN."""
        nameless = [group_id for group_id, score in scores.items() if math.isnan(score)]
        if nameless:
            raise ValueError(f"scores must be numbers, got NaN for groups {nameless}; leave them out")
        for batch in _batches(list(scores.items())):
            self._call("prioritise", self._epoch, *itertools.chain.from_iterable(batch))

    def drop(self, group_ids: Iterable[int], reason: str) -> None:
        """Give up groups in whatever state they are: they count as dropped for `reason`, and their slots are free.

        Those that were used for an earlier step than the one this learner claims for now are retired instead.
        """
        for batch in _batches(list(group_ids)):
            self._call("drop", self._epoch, self._last_step_made, reason, *batch)

    def settle(self, step: int) -> int:
        """Count what was claimed for steps up to `step` as trained: a checkpoint that covers them is durable."""
        if step > self._last_step_made:  # in another thread than the one that claims, it never is
            self._last_step_made = step
        return self._in_batches("settle", step, BATCH_GROUPS)

    def reopen(self, step: int) -> int:
        """Take back the uses for later steps than `step`, of which the learner that resumed from there knows nothing.

        Return how many groups that were; they are ready again.
        """
        return self._in_batches("reopen", step, BATCH_GROUPS, self._num_claims)

    # --- The actors' verbs.

    def lease(self, actor: str) -> Lease | None:
        """The oldest queued group, for `actor` alone; None when nothing is queued."""
        ttl_ms = round(1000 * self._lease_ttl_s)
        reply = self._call("lease", actor, uuid.uuid4().hex, ttl_ms)
        if reply is None:
            return None
        fence, encoded_ticket, *missing = reply
        ticket = decode(Ticket, encoded_ticket)
        members, attempts, records = missing[::3], missing[1::3], missing[2::3]
        return Lease(
            ticket=ticket,
            fence=int(fence),
            missing=dict(zip(members, attempts, strict=True)),
            partials=self._read_partials(ticket, dict(zip(members, records, strict=True))),
            ttl_s=self._lease_ttl_s,
        )

    def heartbeat(self, actor: str, leases: Iterable[Lease]) -> set[int]:
        """Hold the leases for another `ttl_s` from now; return the group ids of those that are still held."""
        rows = [(lease.ticket.group_id, lease.fence) for lease in leases]
        ttl_ms = round(1000 * self._lease_ttl_s)
        return {int(held) for held in self._call("heartbeat", actor, ttl_ms, *itertools.chain.from_iterable(rows))}

    def insert(self, lease: Lease, trajectory: Trajectory) -> InsertResult:
        """Store one member of a leased group. Raises InvalidTrajectory before anything is sent.

        The payload comes first, with a time to live, so that one without a commit goes away by itself; NX, so that a
        second try can neither change nor unsettle what is already committed.
        """
        return self.insert_all([(lease, trajectory)])[0]

    def insert_all(self, attempts: Iterable[tuple[Lease, Trajectory]]) -> list[InsertResult]:
        """As `insert`, for a thread that has many at hand: a few are under way at any time.

        What raises may leave those before it stored; to insert all of them again is harmless.
        """
        return self._store("insert", "blob", attempts, Outcome.POLICY)

    def hand_in(self, lease: Lease, partial: Trajectory) -> InsertResult:
        """Store the whole turns that a preempted member of a leased group has, for the next lease to go on from.

        The member stays missing: `release` the lease next. Raises InvalidTrajectory before anything is sent, as for a
        partial that is not PREEMPTED or has no turn. One that an earlier lease handed in is replaced.
        """
        return self._store("hand_in", "partial", [(lease, partial)], Outcome.PREEMPTED)[0]

    def fail(self, lease: Lease, member: int, *, attempt: int, outcome: Outcome, reason: str) -> int | None:
        """Report an attempt that failed by no doing of the policy's; return the attempt to make next.

        None when there is none to make: the group is out of attempts and dropped with its outcome as the reason, or the
        lease is no longer held, or the member is stored already. A partial of the member goes with the failed attempt.
        """
        group_id = lease.ticket.group_id
        failure = Failure(
            group_id=group_id, member=member, attempt=attempt, outcome=outcome.value, reason=_told(reason)
        )  # fmt: skip
        reply = self._call("fail", group_id, member, attempt, lease.fence, outcome.value, encode(failure))
        return None if reply is None else int(reply)

    def release(self, lease: Lease) -> None:
        """Give the missing members back at once: the actor is leaving."""
        self._call("release", lease.ticket.group_id, lease.fence)

    # --- People's verbs.

    def quarantine(self, group_id: int, reason: str) -> bool:
        """Set a group aside as it is, whatever its state, and say whether it is; a lease on it is lost.

        False where there is none, or a model learned from it: then it is retired. The learner does so with poison. Past
        MAX_QUARANTINED the oldest is dropped as `poison`.
        """
        why = Quarantined(group_id=group_id, member=None, actor=None, reason=_told(reason))
        return bool(self._call("quarantine", "", NO_STEP, group_id, encode(why), MAX_QUARANTINED))

    def requeue(self, group_ids: Iterable[int]) -> int:
        """Let groups that are quarantined, leased, or ready and never used begin anew; return how many.

        Their members are dropped as `requeued`, a lease on them is lost, and every attempt is there to be made again.
        """
        return sum(int(self._call("requeue", uuid.uuid4().hex, *batch)) for batch in _batches(list(group_ids)))

    # --- What people and metrics read.

    def ledger(self) -> Ledger:
        """The books, as the verbs keep them."""
        return read_ledger(self._client, self._shard_name, stream=self._stream)

    def audit(self) -> list[str]:
        """What contradicts the books in a recount of everything that is stored; empty when all is well."""
        return audit(self._client, self._shard_name, stream=self._stream)

    def failures(self) -> list[Failure]:
        """The last hundred failed attempts, newest first."""
        frames: list[Any] = self._client.lrange(f"{self._base}:failures", 0, -1)
        return [decode(Failure, frame) for frame in frames]

    def quarantined(self) -> list[Quarantined]:
        """The groups that are set aside, newest first."""
        ids: list[Any] = self._client.zrevrange(f"{self._base}:quarantined", 0, -1)
        pipeline = self._client.pipeline(transaction=False)
        for group_id in ids:
            pipeline.hget(f"{self._base}:group:{group_id.decode()}", "why")
        # One without a reason was requeued or dropped between the two reads.
        return [decode(Quarantined, why) for why in pipeline.execute() if why is not None]

    # ---

    def _store(
        self, verb: str, kind: str, attempts: Iterable[tuple[Lease, Trajectory]], outcome: Outcome
    ) -> list[InsertResult]:
        script = self._scripts[verb]
        calls: list[tuple[tuple[str, ...], tuple[int | str, ...]]] = []

        def requests() -> Iterator[bytes]:
            for lease, trajectory in attempts:
                frame = self._payloads.encode(lease.ticket, trajectory, outcome=outcome)
                group_id, member = trajectory.group_id, trajectory.member
                name = self._payloads.name(kind, group_id, member, trajectory.attempt, lease.fence)
                record = record_of(trajectory, fence=lease.fence, num_bytes=len(frame))
                keys, arguments = (self._base, name), (group_id, member, record)
                calls.append((keys, arguments))
                yield packed(
                    ("SET", name, frame, "EX", ORPHAN_TTL_S, "NX"),
                    ("EVALSHA", script.sha, len(keys), *keys, *arguments),
                )

        replies = self._payloads.bulk.exchange(requests(), num_replies=2)
        return [_stored(script, *call, *reply) for call, reply in zip(calls, replies, strict=True)]

    def _read_partials(self, ticket: Ticket, records: dict[int, bytes]) -> dict[int, Trajectory]:
        """The partials by member; one that cannot be used is discarded, and its member begins anew."""
        entries = [Entry(ticket, member, record) for member, record in records.items() if record]
        partials = {}
        for entry, partial in zip(
            entries, self._payloads.read("partial", entries, outcome=Outcome.PREEMPTED), strict=True
        ):
            if isinstance(partial, Trajectory):
                partials[entry.member] = partial
            else:
                why = "lost_payload" if isinstance(partial, LostPayload) else "poison"
                self._call("discard", ticket.group_id, entry.member, entry.record, why)
        return partials

    def _read_groups(self, reply: list[Any]) -> list[Group]:
        """The groups with their payloads, but not those that lost one or hold poison: these are given up."""
        rows = [(decode(Ticket, ticket), num_uses, records) for ticket, num_uses, *records in reply]
        entries = [Entry(ticket, *member) for ticket, _, records in rows for member in enumerate(records)]
        stored = iter(self._payloads.read("blob", entries, outcome=Outcome.POLICY))
        groups = []
        for ticket, num_uses, records in rows:
            members = list(itertools.islice(stored, len(records)))
            trajectories = [member for member in members if isinstance(member, Trajectory)]
            if len(trajectories) == len(members):
                groups.append(Group(ticket=ticket, num_uses=num_uses, trajectories=trajectories))
            else:
                self._give_up(ticket.group_id, members, records)
        return groups

    def _give_up(self, group_id: int, members: list[Trajectory | Unusable], records: list[bytes]) -> None:
        """Drop the group whose first unusable member is lost, quarantine the one where it is poison."""
        member, why = next((number, each) for number, each in enumerate(members) if isinstance(each, Unusable))
        if isinstance(why, LostPayload):
            self.drop([group_id], "lost_payload")
            return
        poison = Quarantined(group_id=group_id, member=member, actor=sender_of(records[member]), reason=_told(str(why)))
        self._call("quarantine", self._epoch, self._last_step_made, group_id, encode(poison), MAX_QUARANTINED)

    def _in_batches(self, verb: str, *arguments: int) -> int:
        total = 0
        while num_groups := int(self._call(verb, self._epoch, *arguments)):
            total += num_groups
        return total

    def _call(self, verb: str, *arguments: Any) -> Any:
        try:
            return self._scripts[verb](keys=[self._base, self._counters], args=arguments)
        except redis.ResponseError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: redis.ResponseError) -> Exception:
        """What a script refused, in our words."""
        if str(error).startswith("FENCEDOUT"):
            return FencedOut(
                f"run {self._run_id}: this learner holds epoch {self._epoch} and was {error}; only one learner may "
                "train a run, so this one stops"
            )
        if str(error).startswith("FORGOTTEN"):
            return RunForgotten(
                f"the Redis server has forgotten run {self._run_id}: it was emptied, or started again without what it "
                "held. Start the learner again, which goes on from its newest checkpoint; docs/replay.md says which "
                "settings lose nothing"
            )
        return error


def _told(reason: str) -> str:
    """What is kept of a reason: its beginning, and of half a character, which no wire takes, a question mark."""
    return reason[:MAX_REASON_CHARS].encode(errors="replace").decode()


def _batches(rows: list[T]) -> Iterable[list[T]]:
    return (rows[start : start + BATCH_GROUPS] for start in range(0, len(rows), BATCH_GROUPS))


def _stored(
    script: scripts.Script, keys: Sequence[str], arguments: Sequence[int | str], sent: Any, committed: Any
) -> InsertResult:
    if isinstance(committed, redis.exceptions.NoScriptError):
        committed = script(keys=keys, args=arguments)
    if isinstance(committed, Exception):
        raise committed
    if isinstance(sent, Exception) and not isinstance(sent, redis.OutOfMemoryError):
        raise sent
    return InsertResult(committed.decode())
