"""The audit: counts everything that is stored and compares it with the books."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis

from slipstream.replay.buffer.payloads import strays
from slipstream.replay.records import scripts
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import STATES, Ledger, ledger_of

LOST = -2  # the reply of PTTL for a missing key
CURE = "the learner repairs it when it meets it; `slipstream replay repair` repairs it now"

Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A group as Redis stores it."""

    state: str
    group_id: str
    place: float  # its score in the state's sorted set
    num_members: int
    num_stored: int  # the group's own counter
    finished: int  # its place in the order in which groups became ready; -1 before that
    newest_policy_version: int  # -1 before the first member
    uses: list[int]  # the steps that claimed it
    has_fence: bool  # an actor leases it
    has_judge: bool  # a judge leases it
    lacks_verdict: bool  # a judge has to mark it, and has not
    is_equal: bool  # all members have the same return
    members: dict[str, int]  # key of each stored member's payload -> its time to live in milliseconds
    partials: dict[str, int]

    @property
    def name(self) -> str:
        return f"group {self.group_id} ({self.state})"


def audit(client: redis.Redis, run_id: str, *, stream: str = "train") -> list[str]:
    """Every contradiction between the books and a recount of everything that is stored; empty if they agree.

    It may run during training. One script reads everything that the books name, at one instant; its duration grows with
    the number of payloads. Keys that the books do not name are searched for afterwards, in small batches.
    """
    base = key(run_id, stream)
    counters, rows, indexes, damaged = scripts.load(client, "prelude", "audit")(keys=[base])
    groups, wrong = _stored_groups(base, rows)
    wrong += [f"{name.decode(errors='replace')} is damaged: no verb writes such a value; {CURE}" for name in damaged]
    ledger = ledger_of(_pairs(counters))
    wrong += [f"{base}:counters: {name} is not a number; {CURE}" for name in ledger.unreadable]
    wrong += _wrong_counters(ledger, groups)
    wrong += _wrong_groups(groups)
    wrong += _wrong_indexes(groups, [_scores(index) for index in indexes])
    known = {f"{base}:group:{group.group_id}" for group in groups}
    known = known.union(*(group.members for group in groups), *(group.partials for group in groups))
    return wrong + [
        f"{name.decode(errors='replace')} belongs to no group" for name in strays(client, base, known=known)
    ]


def _stored_groups(base: str, rows: list[Any]) -> tuple[list[StoredGroup], list[str]]:
    """The readable groups, and a line for each unreadable one."""
    groups, wrong = [], []
    for state, group_id, place, row, payloads in rows:
        name = f"group {group_id.decode(errors='replace')} is {state.decode()}"
        if not row:
            wrong.append(f"{name}, and its hash is missing")
            continue
        try:
            groups.append(_stored_group(base, state.decode(), group_id.decode(), float(place), _pairs(row), payloads))
        except (LookupError, ValueError) as error:
            wrong.append(f"{name}, and its hash is damaged: {error!r}; {CURE}")
    return groups, wrong


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list[bytes]) -> Scores:
    return {name.decode(errors="replace"): float(score) for name, score in _pairs(flat).items()}


def _stored_group(
    base: str, state: str, group_id: str, place: float, row: dict[bytes, bytes], payloads: list[Any]
) -> StoredGroup:
    lifetimes = {
        name.decode(errors="replace"): lifetime for name, lifetime in zip(payloads[::2], payloads[1::2], strict=True)
    }
    return StoredGroup(
        state=state,
        group_id=str(int(group_id)),
        place=place,
        num_members=int(row[b"num_members"]),
        num_stored=int(row[b"num_stored"]),
        finished=int(row.get(b"finished", -1)),
        newest_policy_version=int(row.get(b"newest_policy_version", -1)),
        uses=[int(step) for step in row.get(b"uses", b"").split(b",") if step],
        has_fence=b"fence" in row,
        has_judge=b"judge_fence" in row,
        lacks_verdict=b"is_judged" in row and b"verdict" not in row,
        is_equal=b"is_equal" in row,
        members={name: left for name, left in lifetimes.items() if name.startswith(f"{base}:blob:")},
        partials={name: left for name, left in lifetimes.items() if name.startswith(f"{base}:partial:")},
    )


def _wrong_counters(ledger: Ledger, groups: list[StoredGroup]) -> list[str]:
    counted = Counter(group.state for group in groups)
    recount = [
        *((state, getattr(ledger, state), counted[state]) for state in STATES),
        ("held trajectories", ledger.held_trajectories, sum(len(group.members) for group in groups)),
        ("held partials", ledger.partials_held, sum(len(group.partials) for group in groups)),
        (
            "ready groups of equal returns",
            ledger.ready_equal,
            sum(group.is_equal for group in groups if group.state == "ready"),
        ),
        ("uses of ready groups", ledger.ready_uses, sum(len(group.uses) for group in groups if group.state == "ready")),
    ]
    wrong = [
        f"the books count {books} {what}, the recount finds {found}" for what, books, found in recount if books != found
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
            wrong.append(f"{name} counts {group.num_stored} stored members, and lists {len(group.members)}")
        whole, finished = group.num_stored == group.num_members, group.state in ("ready", "claimed")
        complete = finished or group.state == "judging"
        if group.state != "quarantined" and whole != complete:
            wrong.append(f"{name} has {group.num_stored} of {group.num_members} members")
        if complete and group.partials:
            wrong.append(f"{name} has {len(group.partials)} partials, and all its members are stored")
        if group.uses and not finished:
            wrong.append(f"{name} was used for steps {group.uses}")
        if group.has_fence != (group.state == "leased"):
            wrong.append(f"{name} has {'a' if group.has_fence else 'no'} fence")
        if group.has_judge and group.state != "judging":
            wrong.append(f"{name} has a judge's fence")
        if (group.lacks_verdict and finished) or (group.state == "judging" and not group.lacks_verdict):
            wrong.append(f"{name} has {'no' if group.lacks_verdict else 'a'} verdict")
        if group.place != _place(group):
            wrong.append(f"{name} has score {group.place:.0f} in its state, expected {_place(group):.0f}")
        payloads = group.members | group.partials
        wrong += [f"{name} lost its payload {payload}" for payload, left in payloads.items() if left == LOST]
        wrong += [f"{name} will lose its payload {payload}" for payload, left in payloads.items() if left >= 0]
    return wrong


def _place(group: StoredGroup) -> float:
    """The score that the group should have in the sorted set of its state.

    Deadlines of leases, the time from which a judge may lease a group, and the order of quarantine are stored nowhere
    else, so any score is right there.
    """
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
        {group.group_id: group.newest_policy_version for group in ready},
        {group.group_id: group.uses[-1] for group in ready if group.uses},
    ]
    return [
        f"the index of ready groups by {what} is {found}, expected {right}"
        for what, found, right in zip(("version", "step"), indexes, expected, strict=True)
        if found != right
    ]
