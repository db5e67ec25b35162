"""The recount: everything that is stored, counted again and held against the books."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis

from replay import scripts
from replay.keys import key
from replay.ledger import STATES, Ledger, ledger_of

LOST = -2  # what PTTL says of a key that is not there
SCAN_KEYS = 10_000  # looked at in one reply
BATCH_KEYS = 1_000  # judged by one run of a script

Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A group as it is found in Redis."""

    state: str
    group_id: str
    place: float  # its score in the state's sorted set
    num_members: int
    num_stored: int  # as the group itself says
    finished: int  # the order of becoming ready; -1 before
    oldest_policy_version: int  # -1 before the first member
    score: float  # infinite without one
    uses: list[int]  # the steps that it was claimed for
    has_fence: bool  # somebody holds it
    members: dict[str, int]  # where the payloads of stored members must be, and the milliseconds that they have to live
    partials: dict[str, int]

    @property
    def name(self) -> str:
        return f"group {self.group_id} ({self.state})"


def audit(client: redis.Redis, run_id: str, *, stream: str = "train") -> list[str]:
    """Recount everything that is stored and say what contradicts the books; empty when all is well.

    It may be run while training goes on. One script sees one instant of what the books name, and takes as long as there
    are payloads; what they do not name is looked for afterwards, key by key, while others have their turns.
    """
    base = key(run_id, stream)
    counters, rows, indexes = scripts.load(client, "prelude", "audit")(keys=[base, f"{base}:counters"])
    stored = [
        (state.decode(), group_id.decode(), float(place), _pairs(row), payloads)
        for state, group_id, place, row, payloads in rows
    ]
    groups = [_stored_group(base, *found) for found in stored if found[3]]
    wrong = [f"group {group_id} is {state} and does not exist" for state, group_id, _, row, _ in stored if not row]
    wrong += _wrong_counters(ledger_of(_pairs(counters)), groups)
    wrong += _wrong_groups(groups)
    wrong += _wrong_indexes(groups, [_scores(index) for index in indexes])
    return wrong + _strays(client, base, groups)


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list[bytes]) -> Scores:
    return {name.decode(): float(score) for name, score in _pairs(flat).items()}


def _stored_group(
    base: str, state: str, group_id: str, place: float, row: dict[bytes, bytes], payloads: list[Any]
) -> StoredGroup:
    lifetimes = {name.decode(): lifetime for name, lifetime in zip(payloads[::2], payloads[1::2], strict=True)}
    return StoredGroup(
        state=state,
        group_id=group_id,
        place=place,
        num_members=int(row[b"num_members"]),
        num_stored=int(row[b"num_stored"]),
        finished=int(row.get(b"finished", -1)),
        oldest_policy_version=int(row.get(b"oldest_policy_version", -1)),
        score=float(row.get(b"score", "inf")),
        uses=[int(step) for step in row.get(b"uses", b"").split(b",") if step],
        has_fence=b"fence" in row,
        members={name: left for name, left in lifetimes.items() if name.startswith(f"{base}:blob:")},
        partials={name: left for name, left in lifetimes.items() if name.startswith(f"{base}:partial:")},
    )


def _wrong_counters(ledger: Ledger, groups: list[StoredGroup]) -> list[str]:
    counted = Counter(group.state for group in groups)
    recount = [
        *((state, getattr(ledger, state), counted[state]) for state in STATES),
        ("held trajectories", ledger.held_trajectories, sum(len(group.members) for group in groups)),
        ("held partials", ledger.partials_held, sum(len(group.partials) for group in groups)),
        ("uses of ready groups", ledger.ready_uses, sum(len(group.uses) for group in groups if group.state == "ready")),
    ]
    wrong = [
        f"the books say {books} {what}, a recount says {found}" for what, books, found in recount if books != found
    ]
    return wrong if ledger.balanced else [*wrong, f"the books do not balance: {ledger.to_dict()}"]


def _wrong_groups(groups: list[StoredGroup]) -> list[str]:
    wrong = []
    for group_id, num_states in Counter(group.group_id for group in groups).items():
        if num_states > 1:
            wrong.append(f"group {group_id} is in {num_states} states at once")
    for group in groups:
        name = group.name
        if group.num_stored != len(group.members):
            wrong.append(f"{name} says {group.num_stored} members are stored, and lists {len(group.members)}")
        whole, finished = group.num_stored == group.num_members, group.state in ("ready", "claimed")
        if group.state != "quarantined" and whole != finished:
            wrong.append(f"{name} has {group.num_stored} of {group.num_members} members")
        if finished and group.partials:
            wrong.append(f"{name} keeps {len(group.partials)} partials that nobody can resume")
        if group.uses and not finished:
            wrong.append(f"{name} was used for steps {group.uses}")
        if group.has_fence != (group.state == "leased"):
            wrong.append(f"{name} has {'a' if group.has_fence else 'no'} fence")
        if group.place != _place(group):
            wrong.append(f"{name} is at {group.place:.0f} in its state and belongs at {_place(group):.0f}")
        payloads = group.members | group.partials
        wrong += [f"{name} lost its payload {payload}" for payload, left in payloads.items() if left == LOST]
        wrong += [f"{name} will lose its payload {payload}" for payload, left in payloads.items() if left >= 0]
    return wrong


def _place(group: StoredGroup) -> float:
    """Where the group belongs in the sorted set of its state; deadlines and the order of arrival are nowhere else."""
    match group.state:
        case "queued":
            return float(group.group_id)
        case "ready":
            return group.finished
        case "claimed":
            return group.uses[-1] if group.uses else -1
    return group.place


def _wrong_indexes(groups: list[StoredGroup], indexes: list[Scores]) -> list[str]:
    ready = [group for group in groups if group.state == "ready"]
    expected: list[Scores] = [
        {group.group_id: group.oldest_policy_version for group in ready},
        {f"{group.finished:016d}:{group.group_id}": -group.score for group in ready},
        {group.group_id: group.uses[-1] for group in ready if group.uses},
    ]
    return [
        f"the ready groups by {what} are {found}, and should be {right}"
        for what, found, right in zip(("version", "score", "step"), indexes, expected, strict=True)
        if found != right
    ]


def _strays(client: redis.Redis, base: str, groups: list[StoredGroup]) -> list[str]:
    """What is stored for good and belongs to no group. A payload with a time to live is an insert in flight."""
    known = {f"{base}:group:{group.group_id}" for group in groups}
    known = known.union(*(group.members for group in groups), *(group.partials for group in groups))
    kinds = tuple(f"{base}:{kind}:" for kind in ("group", "blob", "partial"))
    found = (name.decode() for name in client.scan_iter(match=f"{base}:*", count=SCAN_KEYS))
    # A key may have come or gone since the books were read, so those in doubt are judged once more.
    in_doubt = [name for name in found if name.startswith(kinds) and name not in known]
    return [f"{name.decode()} belongs to no group" for name in _unnamed(client, base, in_doubt)]


def _unnamed(client: redis.Redis, base: str, names: list[str]) -> Iterable[bytes]:
    script = scripts.load(client, "prelude", "unnamed")
    for start in range(0, len(names), BATCH_KEYS):
        yield from script(keys=[base, *names[start : start + BATCH_KEYS]])
