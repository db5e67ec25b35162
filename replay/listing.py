"""The groups of a stream as they lie in Redis: reads only, in pages, while everyone else goes on.

No script and no transaction, so that a viewer may do it: first which groups there are, state by state in the order in
which groups go through them, then what each of them holds. A group that left Redis in between is left out, and one that
went back to an earlier state in the moment of reading may be.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from common.connection import node_of
from common.wire import decode
from replay.keys import key
from replay.ledger import STATES
from replay.ticket import Ticket

PAGE_GROUPS = 256


class NotRecorded(LookupError):
    """What was asked for is nowhere; the message says where it was looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedMember:
    """One stored member, as its group's record names it."""

    attempt: int
    fence: int
    oldest_policy_version: int
    num_bytes: int
    num_tokens: int
    num_turns: int
    duration_ms: int
    actor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedGroup:
    """A group as it was found. Times are the server's, in seconds."""

    ticket: Ticket
    state: str
    opened_s: float  # since it was opened
    changed_s: float  # since it came into its state
    holder: str  # the actor that leases it; "" when none does
    lease_left_s: float | None  # below 0 once it has expired and nobody has noticed; None when it is not leased
    attempts: int  # the most that were begun at one member
    oldest_policy_version: int | None  # None while nothing is stored
    uses: list[int]  # the steps that it was claimed for, in order
    members: dict[int, ListedMember]

    @property
    def group_id(self) -> int:
        return self.ticket.group_id

    def payload(self, base: str, member: int) -> str:
        """The key of a stored member's payload."""
        stored = self.members[member]
        return f"{base}:blob:{self.group_id}:{member}:{stored.attempt}:{stored.fence}"


def list_groups(
    client: redis.Redis, run_id: str, *, states: Collection[str] = STATES, stream: str = "train"
) -> Iterator[ListedGroup]:
    """Yield the groups in `states`, each state in its own order: by id, deadline, time of finishing, last use."""
    base = key(run_id, stream)
    wanted = [state for state in STATES if state in states]
    with node_of(client, base).pipeline(transaction=False) as all_states:
        for state in wanted:
            all_states.zrange(f"{base}:{state}", 0, -1, withscores=True)
        found: list[Any] = all_states.execute()
    last_seen = {
        int(group_id): (state, int(group_id), score)
        for state, rows in zip(wanted, found, strict=True)
        for group_id, score in rows
    }
    places = sorted(last_seen.values(), key=lambda place: wanted.index(place[0]))
    for start in range(0, len(places), PAGE_GROUPS):
        yield from _read(client, base, places[start : start + PAGE_GROUPS])


def find_group(client: redis.Redis, run_id: str, group_id: int, *, stream: str = "train") -> ListedGroup | None:
    """The group of that id; None when Redis does not hold it."""
    base = key(run_id, stream)
    with node_of(client, base).pipeline(transaction=False) as all_states:
        for state in STATES:
            all_states.zscore(f"{base}:{state}", str(group_id))
        scores: list[Any] = all_states.execute()
    places = [(state, group_id, score) for state, score in zip(STATES, scores, strict=True) if score is not None]
    return next(_read(client, base, places[-1:]), None)


def payloads(client: redis.Redis, run_id: str, group: ListedGroup, *, stream: str = "train") -> dict[int, bytes | None]:
    """The stored members' payloads as they lie there, unjudged; None for one that is gone."""
    names = [group.payload(key(run_id, stream), member) for member in group.members]
    frames: list[Any] = client.mget(names) if names else []
    return dict(zip(group.members, frames, strict=True))


def _read(client: redis.Redis, base: str, places: list[tuple[str, int, float]]) -> Iterator[ListedGroup]:
    with node_of(client, base).pipeline(transaction=False) as page:  # a cluster's own knows no TIME
        page.time()
        for _, group_id, _ in places:
            page.hgetall(f"{base}:group:{group_id}")
        (seconds, microseconds), *rows = page.execute()
    now_s = seconds + microseconds / 1e6
    for (state, _, score), row in zip(places, rows, strict=True):
        if row:
            yield _listed(state, score, {name.decode(): value for name, value in row.items()}, now_s)


def _listed(state: str, score: float, row: dict[str, bytes], now_s: float) -> ListedGroup:
    stored = [int(name.removeprefix("member:")) for name in row if name.startswith("member:")]
    attempts = [int(value) for name, value in row.items() if name.startswith("attempt:")]
    return ListedGroup(
        ticket=decode(Ticket, row["ticket"]),
        state=state,
        opened_s=now_s - int(row["opened_ms"]) / 1000,
        changed_s=now_s - int(row["changed_ms"]) / 1000,
        holder=row.get("actor", b"").decode(errors="replace") if state == "leased" else "",
        lease_left_s=score / 1000 - now_s if state == "leased" else None,
        attempts=max(attempts, default=0) + 1,
        oldest_policy_version=int(row["oldest_policy_version"]) if "oldest_policy_version" in row else None,
        uses=[int(step) for step in row.get("uses", b"").decode().split(",") if step],
        members={member: _member(row[f"member:{member}"]) for member in sorted(stored)},
    )


def _member(record: bytes) -> ListedMember:
    attempt, fence, oldest, num_bytes, num_tokens, num_turns, duration_ms, actor = record.decode(
        errors="replace"
    ).split(":", 7)
    return ListedMember(
        attempt=int(attempt),
        fence=int(fence),
        oldest_policy_version=int(oldest),
        num_bytes=int(num_bytes),
        num_tokens=int(num_tokens),
        num_turns=int(num_turns),
        duration_ms=int(duration_ms),
        actor=actor,
    )
