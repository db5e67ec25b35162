"""The buffer as the learner uses it: opens groups, claims them for steps, and settles or reopens the claims.

Each verb sends the learner's epoch, and raises FencedOut after a newer learner has acquired one. `verbs` draws the
states of a group.
"""

import itertools
import logging
import uuid
from collections.abc import Iterable
from typing import Any

import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.wire import WireError, decode, encode
from slipstream.common.records.trajectory import InvalidTrajectory, Outcome, Trajectory
from slipstream.replay.buffer.payloads import Entry, LostPayload, Payloads, Unusable, read_record
from slipstream.replay.buffer.verbs import BATCH_GROUPS, LEARNERS, NO_STEP, Verbs, in_batches
from slipstream.replay.records.failures import Failure, Quarantined, cut_reason, read_failures
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import Ledger, ledger_of
from slipstream.replay.records.ticket import Group, Ticket, Verdict, decode_ticket, with_verdict

NUM_REMEMBERED = 10_000  # groups claimed last; a server loses the claims of seconds
REQUEST_TTL_S = 1000  # a repeated request for an epoch is recognised for this long; no network delays one longer

log = logging.getLogger(__name__)


class LearnerBuffer:
    """One stream of groups of one run, for the run's learner. Threads may share it."""

    def __init__(
        self, client: redis.Redis, run_id: str, replay: ReplayConfig, *, vocab_size: int, stream: str = "train"
    ) -> None:
        self._client = client
        self._max_attempts = replay.max_attempts
        self._base = key(run_id, stream)
        self._payloads = Payloads(client, self._base, run_id, replay, vocab_size=vocab_size)
        self._verbs = Verbs(client, run_id, self._base, LEARNERS)
        self._num_claims = 0
        # By group, of those claimed last: who played its members and when, and how often it was used.
        self._claimed: dict[int, tuple[set[tuple[str, float]], int]] = {}
        self._last_step_made = NO_STEP  # the step before the one that this learner claims for now

    def acquire_epoch(self) -> int:
        """Become the run's learner: every earlier one is fenced out. Call it once, before the other verbs."""
        self._verbs.epoch = int(self._verbs.call("acquire_epoch", uuid.uuid4().hex, REQUEST_TTL_S))
        return self._verbs.epoch

    def adopt_epoch(self, epoch: int) -> None:
        """Act as the learner that acquired `epoch` through the buffer of another stream.

        Only one buffer of a stream may: it numbers its claims, and the numbers must rise within an epoch.
        """
        self._verbs.epoch = epoch

    def open(self, tickets: Iterable[Ticket]) -> int:
        """Queue the tickets, in rising order of group_id; return how many were new.

        Ids at or below the highest one ever opened are skipped.
        """
        rows = [(ticket.group_id, ticket.num_members, encode(ticket), int(ticket.is_judged)) for ticket in tickets]
        group_ids = [group_id for group_id, *_ in rows]
        if group_ids != sorted(set(group_ids)):
            raise ValueError(f"tickets must be in rising order of group_id, got {group_ids}; sort them")
        return sum(
            int(self._verbs.call("open", self._verbs.epoch, self._max_attempts, *itertools.chain.from_iterable(batch)))
            for batch in in_batches(rows)
        )

    def claim(
        self,
        step: int,
        num_groups: int,
        *,
        policy_version: int,
        max_lag: int,
        max_uses: int = 1,
        beside_equal: bool = False,
    ) -> list[Group]:
        """Take the `num_groups` groups that have been ready longest, for `step`; [] if there are fewer.

        With `beside_equal`, those whose members all have the same return come in addition, also if there are fewer.

        A step uses a group at most once; a group that fewer than `max_uses` steps have used stays ready. First, ready
        groups whose newest token is more than `max_lag` versions older than `policy_version` are dropped as `too_old`:
        none of their tokens would be trained. A group with an invalid payload is quarantined, and a group that lost a
        payload is dropped. A group that was returned before comes again if the server lost that claim: it counts as
        trained once, with `step`. All three are missing from the result: claim again for the rest of the batch.
        """
        self._last_step_made = step - 1
        arguments = (self._num_claims, step, num_groups, policy_version - max_lag, max_uses, int(beside_equal))
        reply = None
        while reply is None:
            reply = self._verbs.call("claim", self._verbs.epoch, *arguments)
        groups = self._read_groups(reply)
        # Only now: if a claim raised half-way, the learner's next attempt repeats the same claim and gets its groups.
        self._num_claims += 1
        return [group for group in groups if not self._came_before(group)]

    def drop(self, group_ids: Iterable[int], reason: str) -> None:
        """Drop groups, in any state, and count them under `reason`.

        A group that an earlier step has used is retired instead.
        """
        for batch in in_batches(list(group_ids)):
            self._verbs.call("drop", self._verbs.epoch, self._last_step_made, reason, *batch)

    def settle(self, step: int) -> int:
        """Count groups claimed for steps up to `step` as trained, and return how many: their checkpoint is durable."""
        if step > self._last_step_made:  # never true in a thread that settles while another one claims
            self._last_step_made = step
        return self._until_done("settle", step, BATCH_GROUPS)

    def reopen(self, step: int) -> int:
        """Take back the uses by steps after `step`, which are made again; return how many groups are ready again."""
        self._claimed.clear()
        return self._until_done("reopen", step, BATCH_GROUPS, self._num_claims)

    def ledger(self) -> Ledger:
        """The books, as the verbs keep them. They are repaired first if they do not balance."""
        found = self._books()
        if found.balanced:
            return found
        self._verbs.repair(f"they do not balance: {found.to_dict()}")
        return self._books()

    def unclaimed(self) -> set[int]:
        """The ids of the groups that are queued, leased, judging or ready."""
        return {int(group_id) for group_id in self._verbs.call("unclaimed")}

    def failures(self) -> list[Failure]:
        """The last hundred failed attempts, newest first."""
        return read_failures(self._client, self._base)

    def _came_before(self, group: Group) -> bool:
        """Remember this use of the group; return whether this learner had it already.

        A server that lost its newest writes gives the group out again, perhaps with members that it lost and had played
        again. A group that a person requeued has only new members, and is another one.
        """
        group_id = group.ticket.group_id
        played = {(member.actor, member.started_at_s) for member in group.trajectories}
        known, known_uses = self._claimed.pop(group_id, (played, 0))
        if played.isdisjoint(known):
            known, known_uses = set(), 0
        self._claimed[group_id] = played | known, max(known_uses, group.num_uses)
        if len(self._claimed) > NUM_REMEMBERED:
            del self._claimed[next(iter(self._claimed))]
        if group.num_uses > known_uses:
            return False
        log.warning(
            "group %d under %s is left out: it was claimed before, and the server lost that claim; with "
            "`appendfsync always` it loses none",
            group_id,
            self._base,
        )
        return True

    def _read_groups(self, reply: list[Any]) -> list[Group]:
        """The claimed groups with their payloads; groups with a lost or an invalid payload are given up."""
        rows = [found for found in map(self._read_row, reply) if found is not None]
        entries = [Entry(ticket, *member) for ticket, _, _, records in rows for member in enumerate(records)]
        stored = iter(self._payloads.read(entries, outcome=Outcome.POLICY))
        groups = []
        for ticket, num_uses, verdict, records in rows:
            members = list(itertools.islice(stored, len(records)))
            trajectories = [member for member in members if isinstance(member, Trajectory)]
            if len(trajectories) < len(members):
                self._give_up(ticket.group_id, members, records)
                continue
            if ticket.is_judged:
                try:
                    trajectories = with_verdict(trajectories, decode(Verdict, verdict or b""))
                except (WireError, InvalidTrajectory) as error:
                    self._quarantine(ticket.group_id, None, None, f"its verdict cannot be used: {error}")
                    continue
            groups.append(Group(ticket=ticket, num_uses=num_uses, trajectories=trajectories))
        return groups

    def _read_row(self, row: list[Any]) -> tuple[Ticket, int, bytes | None, list[bytes]] | None:
        """(ticket, uses, verdict, records) of a claimed group; None if its ticket is unreadable: then it is dropped."""
        group_id, frame, num_uses, verdict, *records = row
        try:
            return decode_ticket(frame, int(group_id), num_members=len(records)), num_uses, verdict, records
        except WireError as error:
            log.error(
                "group %d under %s has an unreadable ticket, and is dropped: %s", int(group_id), self._base, error
            )
            self.drop([int(group_id)], "damaged")
            return None

    def _give_up(self, group_id: int, members: list[Trajectory | Unusable], records: list[bytes]) -> None:
        """Drop the group if its first unusable payload is lost; quarantine it if that payload is invalid."""
        member, why = next((number, each) for number, each in enumerate(members) if isinstance(each, Unusable))
        if isinstance(why, LostPayload):
            self._verbs.call("lost", self._verbs.epoch, self._last_step_made, group_id, member, records[member])
            return
        self._quarantine(group_id, member, read_record(records[member]).actor, str(why))

    def _quarantine(self, group_id: int, member: int | None, actor: str | None, reason: str) -> None:
        poison = Quarantined(group_id=group_id, member=member, actor=actor, reason=cut_reason(reason))
        self._verbs.quarantine(poison, last_step_made=self._last_step_made)

    def _books(self) -> Ledger:
        counters = self._verbs.call("books")
        return ledger_of(dict(zip(counters[::2], counters[1::2], strict=True)))

    def _until_done(self, verb: str, *arguments: int) -> int:
        total = 0
        while num_groups := int(self._verbs.call(verb, self._verbs.epoch, *arguments)):
            total += num_groups
        return total
