"""Lists the groups of a stream as Redis stores them: it only reads, in pages, while the run continues.

It uses no script and no transaction, so a viewer may call it. It first reads the ids of each state, in the order in
which groups pass through the states, and then the contents of each group. A group that left Redis in between is left
out. A group that returned to an earlier state in between may be left out too.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from slipstream.common.process.wire import WireError, decode
from slipstream.replay.buffer.payloads import Sent, read_record
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import STATES
from slipstream.replay.records.records import log_skipped
from slipstream.replay.records.scripts import is_damage
from slipstream.replay.records.ticket import Ticket

PAGE_GROUPS = 256


class NotRecorded(LookupError):
    """The requested group, member or step does not exist; the message says which places were searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedGroup:
    """A group as Redis stores it. Durations are in seconds of the server's clock."""

    ticket: Ticket
    state: str
    opened_s: float  # since it was opened
    changed_s: float  # since it entered its state
    holder: str  # the actor or the judge that leases it; "" if it is not leased
    lease_left_s: float | None  # below 0 for a lease that expired and was not swept yet; None if it is not leased
    attempts: int  # the largest number of attempts that any member has started
    newest_policy_version: int | None  # None while no member is stored
    uses: list[int]  # the steps that claimed it, in order
    members: dict[int, Sent]

    @property
    def group_id(self) -> int:
        return self.ticket.group_id


def list_groups(
    client: redis.Redis, run_id: str, *, states: Collection[str] = STATES, stream: str = "train"
) -> Iterator[ListedGroup]:
    """Yield the groups in `states`, each state in its own order: by id, deadline, time of finishing, last use."""
    base = key(run_id, stream)
    wanted = [state for state in STATES if state in states]
    with client.pipeline(transaction=False) as all_states:
        for state in wanted:
            all_states.zrange(f"{base}:{state}", 0, -1, withscores=True)
        found = _readable(all_states.execute(raise_on_error=False), [f"{base}:{state}" for state in wanted])
    last_seen = {
        int(group_id): (state, int(group_id), score)
        for state, rows in zip(wanted, found, strict=True)
        for group_id, score in rows or []
        if _is_id(group_id, f"{base}:{state}")
    }
    places = sorted(last_seen.values(), key=lambda place: wanted.index(place[0]))
    for start in range(0, len(places), PAGE_GROUPS):
        yield from _read(client, base, places[start : start + PAGE_GROUPS])


def find_group(client: redis.Redis, run_id: str, group_id: int, *, stream: str = "train") -> ListedGroup | None:
    """The group of that id; None if Redis does not have it."""
    base = key(run_id, stream)
    with client.pipeline(transaction=False) as all_states:
        for state in STATES:
            all_states.zscore(f"{base}:{state}", str(group_id))
        scores = _readable(all_states.execute(raise_on_error=False), [f"{base}:{state}" for state in STATES])
    places = [(state, group_id, score) for state, score in zip(STATES, scores, strict=True) if score is not None]
    return next(_read(client, base, places[-1:]), None)


def payloads(client: redis.Redis, run_id: str, group: ListedGroup, *, stream: str = "train") -> dict[int, bytes | None]:
    """The stored members' payloads, unchecked; None for a missing one."""
    base = f"{key(run_id, stream)}:blob:{group.group_id}"
    names = [f"{base}:{member}:{stored.attempt}:{stored.fence}" for member, stored in group.members.items()]
    frames: list[Any] = client.mget(names) if names else []
    return dict(zip(group.members, frames, strict=True))


def _read(client: redis.Redis, base: str, places: list[tuple[str, int, float]]) -> Iterator[ListedGroup]:
    names = [f"{base}:group:{group_id}" for _, group_id, _ in places]
    with client.pipeline(transaction=False) as page:
        page.time()
        for name in names:
            page.hgetall(name)
        (seconds, microseconds), *rows = _readable(page.execute(raise_on_error=False), ["the clock", *names])
    now_s = seconds + microseconds / 1e6
    for (state, _, score), name, row in zip(places, names, rows, strict=True):
        if not row:
            continue
        try:
            yield _listed(state, score, {field.decode(errors="replace"): value for field, value in row.items()}, now_s)
        except (WireError, LookupError, ValueError) as error:
            log_skipped(name, f"{error!r}; `slipstream replay audit` lists what is damaged")


def _readable(replies: list[Any], names: Sequence[str]) -> list[Any]:
    """The replies of a pipeline, with None for a key of another type."""
    for at, (name, reply) in enumerate(zip(names, replies, strict=True)):
        if isinstance(reply, Exception):
            if not is_damage(reply):
                raise reply
            log_skipped(name, str(reply))
            replies[at] = None
    return replies


def _is_id(group_id: bytes, name: str) -> bool:
    if not group_id.isdigit() or len(group_id) > 14:
        log_skipped(name, f"{group_id[:40]!r} is not a group id; `slipstream replay audit` lists what is damaged")
        return False
    return True


def _listed(state: str, score: float, row: dict[str, bytes], now_s: float) -> ListedGroup:
    stored = [int(name.removeprefix("member:")) for name in row if name.startswith("member:")]
    attempts = [int(value) for name, value in row.items() if name.startswith("attempt:")]
    return ListedGroup(
        ticket=decode(Ticket, row["ticket"]),
        state=state,
        opened_s=now_s - int(row["opened_ms"]) / 1000,
        changed_s=now_s - int(row["changed_ms"]) / 1000,
        holder=row.get("judge" if state == "judging" else "actor", b"").decode(errors="replace"),
        lease_left_s=score / 1000 - now_s if state == "leased" or "judge" in row else None,
        attempts=max(attempts, default=0) + 1,
        newest_policy_version=int(row["newest_policy_version"]) if "newest_policy_version" in row else None,
        uses=[int(step) for step in row.get("uses", b"").decode().split(",") if step],
        members={member: read_record(row[f"member:{member}"]) for member in sorted(stored)},
    )
