"""The books of a stream: every group and every trajectory is in exactly one account, at any instant.

    opened    = trained + sum(dropped by reason) + queued + leased + ready + claimed + quarantined    (groups)
    inserted  = trained + sum(dropped by reason) + held                                               (trajectories)
    handed in = resumed + sum(discarded by reason) + held                                             (partials)

The verbs keep the counters; `replay.audit` counts again from what is stored.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from replay.keys import key

STATES = ("queued", "leased", "ready", "claimed", "quarantined")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The counters at one instant."""

    opened: int  # groups, like the seven that follow
    trained: int
    dropped: dict[str, int]  # by reason
    queued: int
    leased: int
    ready: int
    claimed: int
    quarantined: int
    finished: int  # groups that became ready, counted again where they were requeued
    claims: int  # uses of groups, less those that were taken back by reopen: a group claimed for two steps counts twice
    ready_uses: int  # those of the groups that are ready
    inserted: int  # trajectories, like the three that follow
    trained_trajectories: int
    dropped_trajectories: dict[str, int]  # by their group's reason, or requeued
    held_trajectories: int
    partials_handed_in: int  # like the three that follow
    partials_resumed: int  # given out with a lease under which their member was then stored
    partials_discarded: dict[str, int]  # by reason: that of a failure or drop, or superseded, poison, lost_payload
    partials_held: int
    failed: dict[str, int]  # attempts by outcome
    dedup_hits: int  # inserts and partials that were held already
    fenced_inserts: int  # inserts and partials under a lease that was lost
    expired_leases: int
    redone_members: int  # attempts that were made again
    # By account: trained, dropped:REASON and finished, of groups made ready; discarded:REASON, of partials that nobody
    # went on from.
    tokens: dict[str, int]
    turns: dict[str, int]  # like tokens
    duration_ms: dict[str, int]  # like tokens: the wall clock of their episodes
    last_group_id: int  # the highest ever opened; -1 before the first

    @property
    def balanced(self) -> bool:
        """Whether the three equations hold."""
        groups = self.trained + sum(self.dropped.values()) + sum(getattr(self, state) for state in STATES)
        dropped_trajectories = sum(self.dropped_trajectories.values())
        trajectories = self.trained_trajectories + dropped_trajectories + self.held_trajectories
        partials = self.partials_resumed + sum(self.partials_discarded.values()) + self.partials_held
        return (self.opened, self.inserted, self.partials_handed_in) == (groups, trajectories, partials)

    def to_dict(self) -> dict[str, Any]:
        """The counters and `balanced`, for JSON."""
        return dataclasses.asdict(self) | {"balanced": self.balanced}


# Where a field is kept under another name than its own.
_COUNTERS = {
    "inserted": "trajectories:inserted",
    "trained_trajectories": "trajectories:trained",
    "held_trajectories": "trajectories:held",
    "partials_handed_in": "partials:handed_in",
    "partials_resumed": "partials:resumed",
    "partials_held": "partials:held",
}
_BY_REASON = {
    "dropped": "dropped:",
    "dropped_trajectories": "trajectories:dropped:",
    "partials_discarded": "partials:discarded:",
    "failed": "failed:",
    "tokens": "tokens:",
    "turns": "turns:",
    "duration_ms": "duration_ms:",
}


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The books of all shards of a stream as one: sums, and the highest of the group ids."""
    first, *others = ledgers
    fields = dataclasses.asdict(first)
    for other in others:
        for name, value in dataclasses.asdict(other).items():
            if isinstance(value, dict):
                fields[name] = {reason: fields[name].get(reason, 0) + value.get(reason, 0)
                                for reason in fields[name] | value}  # fmt: skip
            elif name == "last_group_id":
                fields[name] = max(fields[name], value)
            else:
                fields[name] += value
    return Ledger(**fields)


def read_ledger(client: redis.Redis, run_id: str, *, stream: str = "train") -> Ledger:
    """The counters as the verbs keep them: one read."""
    counters: dict[Any, Any] = client.hgetall(key(run_id, stream, "counters"))
    return ledger_of(counters)


def ledger_of(counters: Mapping[bytes, bytes]) -> Ledger:
    """The ledger that the stored counters make."""
    numbers = {"last_group_id": -1} | {name.decode(): int(value) for name, value in counters.items()}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Ledger):
        prefix = _BY_REASON.get(field.name)
        if prefix is None:
            fields[field.name] = numbers.get(_COUNTERS.get(field.name, field.name), 0)
        else:
            fields[field.name] = {
                name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix) and value
            }
    return Ledger(**fields)
