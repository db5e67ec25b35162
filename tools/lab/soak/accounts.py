"""Compares the actors' journals and the learner's model with the ledger, for every acknowledged insert.

An acknowledged insert is lost if it is neither trained, nor stored, nor in a dropped group. A group counts as trained
twice if the model learned from it in two steps, or if it is in the model and still stored.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import STATES, Ledger, read_ledger
from slipstream.replay.records.ticket import InsertResult
from slipstream.tools.lab.soak.actor import Acknowledged, read_journal
from slipstream.tools.lab.soak.learner import Learned, read_steps

HELD = (InsertResult.STORED, InsertResult.DUPLICATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """The result of the comparison; the processes that write to either side must have ended."""

    ledger: Ledger
    num_acknowledged: int  # distinct inserts that were acknowledged to an actor
    num_trained: int  # groups in the model
    lost: list[str]
    twice: list[str]
    wrong: list[str]  # all other contradictions

    @property
    def hold(self) -> bool:
        return not (self.lost or self.twice or self.wrong)


def compare(client: redis.Redis, run_id: str, *, journals: list[Path], steps: Path) -> Accounts:
    """Read both sides once, and compare them."""
    lines = [line for journal in journals for line in read_journal(journal)]
    acknowledged = {(line.group, line.member): line for line in lines if line.result in HELD}
    model = read_steps(steps)
    trained = {group_id: members for step in model for group_id, members in step.groups.items()}
    num_uses = Counter(group_id for step in model for group_id in step.groups)
    held = _held(client, run_id)
    ledger = read_ledger(client, run_id)
    num_gone = ledger.last_group_id + 1 - len(trained.keys() | held.keys())
    places = [_misplaced(line, trained, held) for line in acknowledged.values()]
    twice = [f"group {group_id} was trained in {uses} steps" for group_id, uses in num_uses.items() if uses > 1]
    twice += _held_twice(lines)
    twice += [f"group {group_id} is trained and still held" for group_id in trained.keys() & held.keys()]
    wrong = audit(client, run_id)
    wrong += _disagreements(ledger, num_trained=len(trained), num_gone=num_gone)
    return Accounts(
        ledger=ledger,
        num_acknowledged=len(acknowledged),
        num_trained=len(trained),
        lost=[place for place in places if place],
        twice=twice,
        wrong=wrong,
    )


def _held(client: redis.Redis, run_id: str) -> dict[int, dict[int, int]]:
    """For each group in Redis: the stored attempt of each member."""
    base = key(run_id, "train")
    groups: dict[int, dict[int, int]] = {}
    for state in STATES:
        group_ids: Any = client.zrange(f"{base}:{state}", 0, -1)
        for group_id in group_ids:
            row: Any = client.hgetall(f"{base}:group:{int(group_id)}")
            groups[int(group_id)] = {
                int(name.removeprefix(b"member:")): int(record.split(b":", 1)[0])
                for name, record in row.items()
                if name.startswith(b"member:")
            }
    return groups


def _misplaced(line: Acknowledged, trained: dict[int, list[Learned]], held: dict[int, dict[int, int]]) -> str | None:
    """What is wrong with an acknowledged insert; None if it is trained, stored, or dropped with its group."""
    what = f"group {line.group} member {line.member} attempt {line.attempt}"
    if line.group in trained:
        learned = trained[line.group][line.member]
        if (learned.attempt, learned.digest) != (line.attempt, line.digest):
            return f"{what} was acknowledged, but attempt {learned.attempt} or other bytes were trained"
    elif line.group in held and held[line.group].get(line.member) != line.attempt:
        return f"{what} was acknowledged, but attempt {held[line.group].get(line.member)} is stored"
    return None


def _held_twice(lines: list[Acknowledged]) -> list[str]:
    attempts: dict[tuple[int, int], set[int]] = {}
    for line in lines:
        if line.result in HELD:
            attempts.setdefault((line.group, line.member), set()).add(line.attempt)
    return [f"group {g} member {m} was acknowledged for attempts {a}" for (g, m), a in attempts.items() if len(a) > 1]


def _disagreements(ledger: Ledger, *, num_trained: int, num_gone: int) -> list[str]:
    found = []
    if ledger.opened != ledger.last_group_id + 1:
        found.append(f"the ledger has {ledger.opened} opened groups, but the last group is {ledger.last_group_id}")
    if ledger.trained != num_trained:
        found.append(f"the ledger has {ledger.trained} trained groups, the model {num_trained}")
    if num_gone != sum(ledger.dropped.values()):
        found.append(f"{num_gone} groups are neither stored nor trained, the ledger has dropped {ledger.dropped}")
    strange = set(ledger.dropped) - {"zero_variance"}
    if strange:
        found.append(f"groups were dropped for {sorted(strange)}: {ledger.dropped}")
    if ledger.repairs:
        found.append(f"the ledger was repaired {ledger.repairs} times")
    return found
