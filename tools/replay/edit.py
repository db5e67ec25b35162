"""`slipstream replay quarantine` and `requeue`: set a group aside, or let groups begin anew."""

from common.config import Config
from replay.buffer import Buffer
from replay.listing import find_group
from tools.printable import json_line
from tools.replay.run_client import Shard, shard_of, shards_of

WHY_NOT = {
    None: "Redis does not hold it; `slipstream replay groups` lists what is there",
    "queued": "it is queued already",
    "ready": "a step was trained on it, so it cannot begin anew",
    "claimed": "it is claimed, so a step is or was trained on it, and no other will be",
    "quarantined": "it is set aside already",
}


def quarantine(config: Config, *, group_id: int, reason: str, stream: str, as_json: bool) -> int:
    """Set a group aside as it is, for `reason`. Return 1 where that cannot be."""
    shard = shard_of(shards_of(config, stream=stream), group_id)
    before = _state(shard, group_id, stream)
    done = before in ("queued", "leased", "ready") and buffer_of(shard, config, stream).quarantine(group_id, reason)
    _say(group_id, before, _state(shard, group_id, stream), done=done, as_json=as_json)
    return 0 if done else 1


def requeue(config: Config, *, group_ids: list[int], stream: str, as_json: bool) -> int:
    """Let each group begin anew: what it has stored is dropped. Return 1 where that cannot be for one of them."""
    shards, num_requeued = shards_of(config, stream=stream), 0
    for group_id in group_ids:
        shard = shard_of(shards, group_id)
        before = _state(shard, group_id, stream)
        done = buffer_of(shard, config, stream).requeue([group_id])
        _say(group_id, before, _state(shard, group_id, stream), done=bool(done), as_json=as_json)
        num_requeued += done
    return 0 if num_requeued == len(group_ids) else 1


def _say(group_id: int, before: str | None, after: str | None, *, done: bool, as_json: bool) -> None:
    if as_json:
        print(json_line({"group_id": group_id, "done": done, "before": before, "after": after}))
    elif done:
        print(f"group {group_id}: {after or 'gone'}; it was {before}")
    else:
        print(f"group {group_id}: nothing done: {WHY_NOT.get(after, 'its state changed meanwhile; try again')}")


def _state(shard: Shard, group_id: int, stream: str) -> str | None:
    found = find_group(shard.client, shard.name, group_id, stream=stream)
    return found.state if found else None


def buffer_of(shard: Shard, config: Config, stream: str) -> Buffer:
    """One shard of a stream, for its verbs that take no learner and no trajectory."""
    return Buffer(
        shard.client,
        config.run.name,
        stream=stream,
        shard=shard.index,
        vocab_size=0,
        lease_ttl_s=config.replay.lease_ttl_s,
        max_attempts=config.replay.max_attempts,
        max_trajectory_bytes=config.replay.max_trajectory_bytes,
    )
