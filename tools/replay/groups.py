"""`slipstream replay groups`: list the groups in the buffer."""

import itertools
from typing import Any

from slipstream.common.config.config import Config
from slipstream.replay.buffer.listing import ListedGroup, list_groups
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.records.ledger import STATES
from slipstream.tools.see.run_client import client_of
from slipstream.tools.terminal.output_lines import print_json
from slipstream.tools.terminal.table import print_rows

COLUMNS = ("group", "state", "s", "task", "holder", "left s", "stored", "newest", "lag", "attempts", "used")


def groups(config: Config, *, state: str | None, limit: int, stream: str, as_json: bool) -> int:
    """List at most `limit` groups, in the order of states: queued, leased, judging, ready, claimed, quarantined."""
    client = client_of(config)
    latest = Bulletin(client, config.run.name).latest()
    published_version = latest.manifest.policy_version if latest else None
    states = [state] if state else STATES
    found = list_groups(client, config.run.name, states=states, stream=stream)
    shown = [group_facts(group, published_version) for group in itertools.islice(found, limit)]
    if as_json:
        return print_json(shown)
    print_rows(COLUMNS, [_row(facts) for facts in shown])
    if next(found, None) is not None:
        print(f"these are the first {limit} groups; give --limit for more")
    return 0


def group_facts(group: ListedGroup, published_version: int | None) -> dict[str, Any]:
    """The facts of a group that are listed. `lag` counts from the newest published version."""
    newest = group.newest_policy_version
    return {
        "group_id": group.group_id,
        "state": group.state,
        "task": group.ticket.task.task_id,
        "changed_s": round(group.changed_s, 3),
        "opened_s": round(group.opened_s, 3),
        "holder": group.holder,
        "lease_left_s": None if group.lease_left_s is None else round(group.lease_left_s, 3),
        "num_stored": len(group.members),
        "num_members": group.ticket.num_members,
        "newest_policy_version": newest,
        "lag": None if newest is None or published_version is None else published_version - newest,
        "attempts": group.attempts,
        "uses": group.uses,
    }


def _row(facts: dict[str, Any]) -> list[str]:
    """The cells of COLUMNS: `s` is the time in the state, `left s` the rest of the lease, `newest` a policy version,
    `used` the steps that trained on it."""

    def shown(name: str) -> str:
        value = facts[name]
        if value is None:
            return ""
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return [
        *map(shown, ("group_id", "state", "changed_s", "task", "holder", "lease_left_s")),
        f"{facts['num_stored']} of {facts['num_members']}",
        *map(shown, ("newest_policy_version", "lag", "attempts")),
        ", ".join(map(str, facts["uses"])),
    ]
