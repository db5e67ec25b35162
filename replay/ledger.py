"""The books of a stream: every group and every trajectory is in exactly one account, at any instant.

    opened    = trained + sum(dropped by reason) + queued + leased + ready + claimed + quarantined    (groups)
    inserted  = trained + sum(dropped by reason) + held                                               (trajectories)
    handed in = resumed + sum(discarded by reason) + held                                             (partials)

The verbs keep the counters; `audit` counts again from what is stored.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis

from replay import scripts
from replay.keys import epoch_key, key

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
    last_group_id: int  # the highest ever opened; -1 before the first

    @property
    def balanced(self) -> bool:
        """Whether the three equations hold."""
        groups = self.trained + sum(self.dropped.values()) + sum(getattr(self, state) for state in STATES)
        dropped_trajectories = sum(self.dropped_trajectories.values())
        trajectories = self.trained_trajectories + dropped_trajectories + self.held_trajectories
        partials = self.partials_resumed + sum(self.partials_discarded.values()) + self.partials_held
        return (self.opened, self.inserted, self.partials_handed_in) == (groups, trajectories, partials)

    @property
    def num_admitted(self) -> int:
        """Groups opened and not dropped."""
        return self.opened - sum(self.dropped.values())

    def to_dict(self) -> dict[str, Any]:
        """The counters and `balanced`, for JSON."""
        return dataclasses.asdict(self) | {"balanced": self.balanced}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A group as it is found in Redis."""

    state: str
    group_id: str
    num_members: int
    num_stored: int  # as the group itself says
    blobs: list[str]  # where the payloads of its stored members must be
    partials: list[str]  # and those of its partials


def read_ledger(client: redis.Redis, run_id: str, *, stream: str = "train") -> Ledger:
    """The counters as the verbs keep them: one read."""
    rows: dict[Any, Any] = client.hgetall(key(run_id, stream, "counters"))
    return _ledger({name.decode(): int(value) for name, value in rows.items()})


def audit(client: redis.Redis, run_id: str, *, stream: str = "train") -> list[str]:
    """Recount everything that is stored and say what contradicts the books; empty when all is well.

    One script sees one instant, so it may be run while training goes on.
    """
    base = key(run_id, stream)
    counters, rows, keys, lifetimes = scripts.load(client, "prelude", "audit")(keys=[base, epoch_key(run_id)])
    ledger = _ledger({name.decode(): int(value) for name, value in _pairs(counters).items()})
    fields = {(state.decode(), group_id.decode()): _pairs(row) for state, group_id, row in rows}
    stored = {name.decode(): lifetime for name, lifetime in zip(keys, lifetimes, strict=True)}
    contradictions = [
        f"group {group_id} is {state} and does not exist" for (state, group_id), row in fields.items() if not row
    ]
    groups = [_stored_group(base, state, group_id, row) for (state, group_id), row in fields.items() if row]
    contradictions += _wrong_counters(ledger, groups)
    contradictions += _wrong_groups(groups, stored)
    return contradictions + _strays(base, groups, stored)


def _ledger(counters: dict[str, int]) -> Ledger:
    def by_reason(prefix: str) -> dict[str, int]:
        return {
            name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix) and value
        }

    return Ledger(
        dropped=by_reason("dropped:"),
        dropped_trajectories=by_reason("trajectories:dropped:"),
        inserted=counters.get("trajectories:inserted", 0),
        trained_trajectories=counters.get("trajectories:trained", 0),
        held_trajectories=counters.get("trajectories:held", 0),
        partials_discarded=by_reason("partials:discarded:"),
        failed=by_reason("failed:"),
        last_group_id=counters.get("last_group_id", -1),
        **{f"partials_{name}": counters.get(f"partials:{name}", 0) for name in ("handed_in", "resumed", "held")},
        **{
            name: counters.get(name, 0)
            for name in (
                *STATES,
                "opened",
                "trained",
                "dedup_hits",
                "fenced_inserts",
                "expired_leases",
                "redone_members",
            )
        },
    )


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _stored_group(base: str, state: str, group_id: str, row: dict[bytes, bytes]) -> StoredGroup:
    payloads: dict[str, list[str]] = {"member": [], "partial": []}
    for field, record in row.items():
        name, _, member = field.decode().partition(":")
        if name in payloads:
            attempt, fence, _ = record.decode().split(":", 2)
            payloads[name].append(f"{group_id}:{member}:{attempt}:{fence}")
    return StoredGroup(
        state=state,
        group_id=group_id,
        num_members=int(row[b"num_members"]),
        num_stored=int(row[b"num_stored"]),
        blobs=[f"{base}:blob:{payload}" for payload in payloads["member"]],
        partials=[f"{base}:partial:{payload}" for payload in payloads["partial"]],
    )


def _wrong_counters(ledger: Ledger, groups: list[StoredGroup]) -> list[str]:
    counted = Counter(group.state for group in groups)
    recount = [
        *((state, getattr(ledger, state), counted[state]) for state in STATES),
        ("held trajectories", ledger.held_trajectories, sum(len(group.blobs) for group in groups)),
        ("held partials", ledger.partials_held, sum(len(group.partials) for group in groups)),
    ]
    wrong = [
        f"the books say {books} {what}, a recount says {found}" for what, books, found in recount if books != found
    ]
    return wrong if ledger.balanced else [*wrong, f"the books do not balance: {ledger.to_dict()}"]


def _wrong_groups(groups: list[StoredGroup], stored: dict[str, int]) -> list[str]:
    wrong = []
    for group_id, num_states in Counter(group.group_id for group in groups).items():
        if num_states > 1:
            wrong.append(f"group {group_id} is in {num_states} states at once")
    for group in groups:
        name = f"group {group.group_id} ({group.state})"
        if group.num_stored != len(group.blobs):
            wrong.append(f"{name} says {group.num_stored} members are stored, and lists {len(group.blobs)}")
        whole = group.num_stored == group.num_members
        if group.state != "quarantined" and whole != (group.state in ("ready", "claimed")):
            wrong.append(f"{name} has {group.num_stored} of {group.num_members} members")
        if group.partials and group.state in ("ready", "claimed"):
            wrong.append(f"{name} keeps {len(group.partials)} partials that nobody can resume")
        payloads = group.blobs + group.partials
        wrong += [f"{name} lost its payload {payload}" for payload in payloads if payload not in stored]
        wrong += [f"{name} will lose its payload {payload}" for payload in payloads if stored.get(payload, -1) >= 0]
    return wrong


def _strays(base: str, groups: list[StoredGroup], stored: dict[str, int]) -> list[str]:
    """What is stored for good and belongs to no group. A payload with a time to live is an insert in flight."""
    known = {f"{base}:group:{group.group_id}" for group in groups}.union(
        *(group.blobs + group.partials for group in groups)
    )
    return [f"{name} belongs to no group" for name, lifetime in stored.items() if lifetime < 0 and name not in known]
