"""The books of a stream: at any instant, every group and every trajectory is in exactly one account.

    opened    = trained + sum(dropped by reason) + queued + leased + judging + ready + claimed
              + quarantined    (groups)
    inserted  = trained + sum(dropped by reason) + held                                               (trajectories)
    handed in = resumed + sum(discarded by reason) + held                                             (partials)

The verbs update the counters; `slipstream.replay.buffer.audit` counts everything stored and compares.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

import redis

from slipstream.replay.records.keys import key
from slipstream.replay.records.records import read_or_nothing

_COUNT = re.compile(rb"\d{1,18}")
STATES = ("queued", "leased", "judging", "ready", "claimed", "quarantined")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The counters at one instant."""

    opened: int  # groups, like the next eight fields
    trained: int
    dropped: dict[str, int]  # by reason
    queued: int
    leased: int
    judging: int  # complete, and not judged yet; 0 without a judge of whole groups
    ready: int
    claimed: int
    quarantined: int
    finished: int  # times that a group became ready; a requeued group counts again
    ready_uses: int  # uses of the groups that are ready
    ready_equal: int  # of the ready groups, those whose members all have the same return; no judged ones
    inserted: int  # trajectories, like the next three fields
    trained_trajectories: int
    dropped_trajectories: dict[str, int]  # by their group's reason, or requeued
    held_trajectories: int
    partials_handed_in: int  # partials, like the next three fields
    partials_resumed: int  # those whose next lease then stored the member
    partials_discarded: dict[str, int]  # by reason: that of a failure or drop, or superseded, poison, lost_payload
    partials_held: int
    failed: dict[str, int]  # attempts by outcome
    dedup_hits: int  # inserts and partials that were stored already
    fenced_inserts: int  # inserts and partials whose lease was lost
    expired_leases: int
    expired_judgings: int  # leases of judges
    fenced_verdicts: int  # verdicts whose lease was lost
    redone_members: int  # members whose attempt was repeated
    episodes: dict[str, int]  # trajectories inserted, by environment; like the next two fields
    successes: dict[str, int]  # those of them that solved their task
    returns: dict[str, float]  # the sum of their returns
    # By account: `produced` counts inserted trajectories; `trained` and `dropped:REASON` those of groups that left;
    # `discarded:REASON` partials that no later lease continued.
    tokens: dict[str, int]
    turns: dict[str, int]  # like tokens
    duration_ms: dict[str, int]  # like tokens: the wall-clock duration of their episodes
    last_group_id: int  # the highest ever opened; -1 before the first
    repairs: int = 0  # times that damaged books were repaired
    unreadable: list[str] = dataclasses.field(default_factory=list)  # counters that are not numbers; they read as 0

    @property
    def balanced(self) -> bool:
        """Whether every counter is a number and the three equations are true."""
        if self.unreadable:
            return False
        groups = self.trained + sum(self.dropped.values()) + sum(getattr(self, state) for state in STATES)
        dropped_trajectories = sum(self.dropped_trajectories.values())
        trajectories = self.trained_trajectories + dropped_trajectories + self.held_trajectories
        partials = self.partials_resumed + sum(self.partials_discarded.values()) + self.partials_held
        return (self.opened, self.inserted, self.partials_handed_in) == (groups, trajectories, partials)

    @property
    def unclaimed(self) -> str:
        """Where the groups are that no step has claimed, as "12 groups queued, 3 leased, 2 ready"."""
        judging = f"{self.judging} judging, " if self.judging else ""
        return f"{self.queued} groups queued, {self.leased} leased, {judging}{self.ready} ready"

    def to_dict(self) -> dict[str, Any]:
        """The counters and `balanced`, for JSON."""
        return dataclasses.asdict(self) | {"balanced": self.balanced}


# Fields whose counter in Redis has another name.
_COUNTERS = {
    "inserted": "trajectories:inserted",
    "trained_trajectories": "trajectories:trained",
    "dropped_trajectories": "trajectories:dropped",
    "held_trajectories": "trajectories:held",
    "partials_handed_in": "partials:handed_in",
    "partials_resumed": "partials:resumed",
    "partials_discarded": "partials:discarded",
    "partials_held": "partials:held",
}
_FIELDS = {_COUNTERS.get(field.name, field.name): field for field in dataclasses.fields(Ledger)}
_ONE_COUNTER = {counter: field.name for counter, field in _FIELDS.items() if field.type is int}
_BY_REASON = {f"{counter}:": field.name for counter, field in _FIELDS.items() if get_origin(field.type) is dict}


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The books of several streams together: sums, and the highest group id."""
    first, *others = ledgers
    fields = dataclasses.asdict(first)
    for other in others:
        for name, value in dataclasses.asdict(other).items():
            if isinstance(value, dict):
                fields[name] = {
                    reason: fields[name].get(reason, 0) + value.get(reason, 0) for reason in fields[name] | value
                }
            elif isinstance(value, list):
                fields[name] = [*fields[name], *value]
            elif name == "last_group_id":
                fields[name] = max(fields[name], value)
            else:
                fields[name] += value
    return Ledger(**fields)


def read_ledger(client: redis.Redis, run_id: str, *, stream: str = "train") -> Ledger:
    """The counters as the verbs keep them: one read."""
    name = key(run_id, stream, "counters")
    counters: dict[Any, Any] | None = read_or_nothing(lambda: client.hgetall(name), name)
    return ledger_of({b"counters": b"of another type"} if counters is None else counters)


def ledger_of(counters: Mapping[bytes, bytes]) -> Ledger:
    """The ledger of the stored counters."""
    fields: dict[str, Any] = dict.fromkeys(_ONE_COUNTER.values(), 0) | {"last_group_id": -1, "unreadable": []}
    fields |= {name: {} for name in _BY_REASON.values()}
    for name, stored in counters.items():
        number, (field, reason) = _number(name, stored), _place(name)
        if number is None:
            fields["unreadable"].append(name.decode(errors="replace"))
        elif reason is None:
            fields |= {field: number} if field else {}
        elif number:
            fields[field][reason] = fields[field].get(reason, 0) + number  # several malformed names may become one
    return Ledger(**fields)


@functools.lru_cache(maxsize=4096)  # names are foreign bytes
def _place(name: bytes) -> tuple[str, str | None]:
    """The field of a counter, empty if it has none, and its reason where the field has one number for each."""
    counter = name.decode(errors="replace")
    for prefix, field in _BY_REASON.items():
        if counter.startswith(prefix):
            return field, counter.removeprefix(prefix)
    return _ONE_COUNTER.get(counter, ""), None


def _number(name: bytes, value: bytes) -> int | float | None:
    """The value of a counter; None if it is not a number that a verb writes."""
    if not name.startswith(b"returns:"):
        return int(value) if _COUNT.fullmatch(value) or (name, value) == (b"last_group_id", b"-1") else None
    try:
        total_return = float(value)
    except ValueError:
        return None
    return total_return if math.isfinite(total_return) else None
