"""The shards of a run: its training groups are distributed over servers, or over hash slots of a cluster.

A group lives on shard `group_id % number of shards`. Each shard is a complete buffer with its own epoch and books. The
keys of the run as a whole, and evaluations, are on the first shard.
"""

from collections.abc import Sequence

import msgspec
import redis

from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.records.keys import shard_name
from slipstream.replay.records.ledger import Ledger, read_ledger, total


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """The epochs that a learner has acquired, one for each shard."""

    epochs: list[int]


class Shards:
    """All shards of the training stream, for the learner's first rank."""

    def __init__(self, buffers: Sequence[LearnerBuffer]) -> None:
        self.buffers = list(buffers)

    def acquire_epochs(self) -> Epochs:
        """Become the run's learner on every shard; every earlier learner is fenced out."""
        return Epochs(epochs=[buffer.acquire_epoch() for buffer in self.buffers])

    def settle(self, step: int) -> int:
        """Settle `step` on every shard; return how many groups were settled. See `LearnerBuffer.settle`."""
        return sum(buffer.settle(step) for buffer in self.buffers)

    def reopen(self, step: int) -> int:
        """Reopen the uses after `step` on every shard; return how many are ready again. See `LearnerBuffer.reopen`."""
        return sum(buffer.reopen(step) for buffer in self.buffers)

    def ledger(self) -> Ledger:
        """The sum of the shards' books."""
        return total(buffer.ledger() for buffer in self.buffers)


def read_shards(clients: Sequence[redis.Redis], run_id: str, *, stream: str = "train") -> Ledger:
    """The sum of a stream's books, read with one client for each shard."""
    return total(read_ledger(client, shard_name(run_id, shard), stream=stream) for shard, client in enumerate(clients))
