"""How often the stored episodes of a run have been in each state of their tasks, in Redis.

`insert` counts an episode in the same script that stores it: once, however often its actor sends it, and never an
attempt that failed, was lost or is played again. States are counted in NUM_BUCKETS buckets, so that the key is bounded;
states that share a bucket are counted together, and seem visited more often than they were.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis

from slipstream.common.records.trajectory import Task, Trajectory
from slipstream.replay.records.keys import key
from slipstream.replay.records.records import read_or_nothing

NUM_BUCKETS = 1 << 18  # some 20 MB of Redis at most; also in insert.lua
MAX_DIGITS = 14  # of a count that this run may have made


class Visits:
    """The counts of one run. Threads may share it."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._client = client
        self._name = key(run_id, "train:visits")

    def read(self, task: Task, states: Sequence[str]) -> list[int]:
        """How often stored episodes have been in each of `states`. A count that is no number reads as 0."""
        buckets = [bucket_of(task, state) for state in states]
        found: Any = read_or_nothing(lambda: self._client.hmget(self._name, buckets), self._name)
        counts = [None] * len(states) if found is None else found
        return [int(count) if count and count.isdigit() and len(count) <= MAX_DIGITS else 0 for count in counts]


def bucket_of(task: Task, state: str) -> int:
    """The bucket of a state; equal keys of different tasks are different states."""
    digest = hashlib.blake2b(f"{task.task_id}\n{state}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % NUM_BUCKETS


def visits_of(trajectory: Trajectory) -> list[int]:
    """The arguments of `insert` that count an episode's own turns in known states: bucket, visits, bucket, visits."""
    counts = Counter(bucket_of(trajectory.task, turn.state_key) for turn in trajectory.own_turns if turn.state_key)
    return [number for pair in sorted(counts.items()) for number in pair]
