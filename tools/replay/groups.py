"""`slipstream replay groups`: what lies in the buffer, group by group."""

import itertools
from dataclasses import dataclass
from typing import Any

from common.config import Config
from replay.bulletin import Bulletin
from replay.ledger import STATES
from replay.listing import ListedGroup, list_groups
from tools.printable import json_line
from tools.replay.run_client import shards_of
from tools.table import print_rows

COLUMNS = ("group", "state", "s", "task", "holder", "left s", "stored", "oldest", "lag", "attempts", "used")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which groups to list; None wants all."""

    state: str | None
    task: str | None  # a task id, or the beginning of one up to a "/"
    actor: str | None  # that leases the group or made a member that is stored
    older_than_s: float | None  # in its state
    policy_version: int | None  # of the oldest token

    def admits(self, group: ListedGroup) -> bool:
        """Whether `group` is one of them; the state is not looked at."""
        task_id = group.ticket.task.task_id
        actors = {group.holder, *(member.actor for member in group.members.values())}
        return (
            (self.task is None or task_id == self.task or task_id.startswith(self.task.rstrip("/") + "/"))
            and (self.actor is None or self.actor in actors)
            and (self.older_than_s is None or group.changed_s > self.older_than_s)
            and (self.policy_version is None or group.oldest_policy_version == self.policy_version)
        )


def groups(config: Config, *, wanted: Wanted, limit: int, stream: str, as_json: bool) -> int:
    """List at most `limit` groups, of the state that is nearest to the actors first."""
    shards = shards_of(config, stream=stream)
    latest = Bulletin(shards[0].client, config.run.name).latest()
    published_version = latest.manifest.policy_version if latest else None
    states = [wanted.state] if wanted.state else STATES
    lists = (list_groups(shard.client, shard.name, states=states, stream=stream) for shard in shards)
    found = filter(wanted.admits, itertools.chain.from_iterable(lists))
    shown = [group_facts(group, published_version) for group in itertools.islice(found, limit)]
    if as_json:
        for facts in shown:
            print(json_line(facts))
        return 0
    print_rows(COLUMNS, [_row(facts) for facts in shown])
    if next(found, None) is not None:
        print(f"these are the first {limit} groups; see more with --limit")
    return 0


def group_facts(group: ListedGroup, published_version: int | None) -> dict[str, Any]:
    """What a person asks about a group. `lag` counts from the newest published version."""
    oldest = group.oldest_policy_version
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
        "oldest_policy_version": oldest,
        "lag": None if oldest is None or published_version is None else published_version - oldest,
        "attempts": group.attempts,
        "uses": group.uses,
    }


def _row(facts: dict[str, Any]) -> list[str]:
    """Under COLUMNS: `s` is the time in the state, `left s` that of the lease, `oldest` a version, `used` by steps."""

    def shown(name: str) -> str:
        value = facts[name]
        if value is None:
            return ""
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return [
        shown("group_id"), shown("state"), shown("changed_s"), shown("task"), shown("holder"), shown("lease_left_s"),
        f"{facts['num_stored']} of {facts['num_members']}", shown("oldest_policy_version"), shown("lag"),
        shown("attempts"), ", ".join(map(str, facts["uses"])),
    ]  # fmt: skip
