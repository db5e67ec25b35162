"""`slipstream replay quarantine` and `requeue`: set a group aside, or let groups begin anew."""

import redis

from common.config import Config
from replay.buffer import Buffer
from replay.fleet import Fleet
from replay.listing import find_group
from tools.printable import json_line
from tools.run_client import client_of

WHY_NOT = {
    None: "Redis does not hold it; `slipstream replay groups` lists what is there",
    "queued": "it is queued already",
    "ready": "a step was trained on it, so it cannot begin anew",
    "claimed": "it is claimed, so a step is or was trained on it, and no other will be",
    "quarantined": "it is set aside already",
}


def quarantine(config: Config, *, group_id: int, reason: str, stream: str, as_json: bool) -> int:
    """Set a group aside as it is, for `reason`. Return 1 where that cannot be."""
    client = client_of(config)
    before = _state(client, config, group_id, stream)
    done = before in ("queued", "leased", "ready") and buffer_of(client, config, stream).quarantine(group_id, reason)
    after = _state(client, config, group_id, stream)
    _say(group_id, before, after, done=done, as_json=as_json)
    return 0 if done else 1


def requeue(config: Config, *, group_ids: list[int], stream: str, as_json: bool) -> int:
    """Let each group begin anew: what it has stored is dropped. Return 1 where that cannot be for one of them."""
    client = client_of(config)
    buffer, num_requeued = buffer_of(client, config, stream), 0
    for group_id in group_ids:
        before = _state(client, config, group_id, stream)
        done = buffer.requeue([group_id])
        after = _state(client, config, group_id, stream)
        _say(group_id, before, after, done=bool(done), as_json=as_json)
        num_requeued += done
    return 0 if num_requeued == len(group_ids) else 1


def _say(group_id: int, before: str | None, after: str | None, *, done: bool, as_json: bool) -> None:
    if as_json:
        print(json_line({"group_id": group_id, "done": done, "before": before, "after": after}))
    elif done:
        print(f"group {group_id}: {after or 'gone'}; it was {before}")
    else:
        print(f"group {group_id}: nothing done: {WHY_NOT.get(after, 'its state changed meanwhile; try again')}")


def _state(client: redis.Redis, config: Config, group_id: int, stream: str) -> str | None:
    found = find_group(client, config.run.name, group_id, stream=stream)
    return found.state if found else None


def buffer_of(client: redis.Redis, config: Config, stream: str) -> Buffer:
    """One stream of the run, for its verbs that take no learner."""
    return Buffer(
        client,
        config.run.name,
        stream=stream,
        vocab_size=Fleet(client, config.run.name).run_facts().vocab_size,
        lease_ttl_s=config.replay.lease_ttl_s,
        max_attempts=config.replay.max_attempts,
        max_trajectory_bytes=config.replay.max_trajectory_bytes,
    )
