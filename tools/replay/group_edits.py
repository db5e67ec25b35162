"""`slipstream replay quarantine`, `requeue` and `repair`: change the groups of a run's buffer."""

import redis

from slipstream.common.config.config import Config
from slipstream.common.process.printable import printable
from slipstream.replay.buffer.listing import find_group
from slipstream.replay.buffer.people_buffer import PeopleBuffer
from slipstream.tools.see.run_client import client_of
from slipstream.tools.terminal.output_lines import json_line

WHY_NOT = {
    None: "it is not in Redis; `slipstream replay groups` lists the groups that are",
    "queued": "it is queued already",
    "ready": "a step was trained on it, so it cannot be queued again",
    "claimed": "it is claimed: a step trains or was trained on it, and no further step will",
    "quarantined": "it is quarantined already",
}


def quarantine(config: Config, *, numbers: list[int], reason: str, stream: str, as_json: bool) -> int:
    """Quarantine a group for `reason`; return 0, or 1 if its state does not allow it."""
    [group_id] = numbers
    client, run_id = client_of(config), config.run.name
    before = _state(client, run_id, group_id, stream)
    buffer = PeopleBuffer(client, run_id, stream=stream)
    done = before not in (None, "claimed", "quarantined") and buffer.quarantine(group_id, reason)
    _report(group_id, before, _state(client, run_id, group_id, stream), done=done, as_json=as_json)
    return 0 if done else 1


def requeue(config: Config, *, numbers: list[int], stream: str, as_json: bool) -> int:
    """Queue each group again and drop what it has stored; return 0, or 1 if the state of a group does not allow it."""
    client, run_id, num_requeued = client_of(config), config.run.name, 0
    buffer = PeopleBuffer(client, run_id, stream=stream)
    for group_id in numbers:
        before = _state(client, run_id, group_id, stream)
        done = buffer.requeue([group_id])
        _report(group_id, before, _state(client, run_id, group_id, stream), done=bool(done), as_json=as_json)
        num_requeued += done
    return 0 if num_requeued == len(numbers) else 1


def repair(config: Config, *, stream: str, as_json: bool) -> int:
    """Make the ledger agree with what is stored; print each repair."""
    for line in PeopleBuffer(client_of(config), config.run.name, stream=stream).repair("requested by a user"):
        print(json_line({"done": line}) if as_json else printable(line))
    return 0


def _report(group_id: int, before: str | None, after: str | None, *, done: bool, as_json: bool) -> None:
    if as_json:
        print(json_line({"group_id": group_id, "done": done, "before": before, "after": after}))
    elif done:
        print(f"group {group_id}: {after or 'gone'}; it was {before}")
    else:
        print(f"group {group_id}: not changed: {WHY_NOT.get(after, 'its state changed meanwhile; try again')}")


def _state(client: redis.Redis, run_id: str, group_id: int, stream: str) -> str | None:
    found = find_group(client, run_id, group_id, stream=stream)
    return found.state if found else None
