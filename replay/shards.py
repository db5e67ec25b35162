"""The shards of a run: its training groups shared out over servers, or over hash slots of a cluster.

A group lives on shard `group_id % number of shards`. Each shard is a whole buffer with an epoch and books of its own;
what concerns the whole run, and evaluations, are on the first.
"""

from collections.abc import Sequence

import msgspec
import redis

from replay.audit import audit
from replay.buffer import Buffer
from replay.keys import shard_name
from replay.ledger import Ledger, read_ledger, total


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner holds of each shard."""

    epochs: list[int]


class Shards:
    """All shards of the training stream, as the learner's first rank sees them."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = list(buffers)

    def acquire_epochs(self) -> Epochs:
        """Become the run's learner on every shard: every earlier one is fenced out."""
        return Epochs(epochs=[buffer.acquire_epoch() for buffer in self.buffers])

    def settle(self, step: int) -> int:
        """As `Buffer.settle`, on every shard."""
        return sum(buffer.settle(step) for buffer in self.buffers)

    def reopen(self, step: int) -> int:
        """As `Buffer.reopen`, on every shard."""
        return sum(buffer.reopen(step) for buffer in self.buffers)

    def ledger(self) -> Ledger:
        """The sum of the shards' books."""
        return total(buffer.ledger() for buffer in self.buffers)


def read_shards(clients: Sequence[redis.Redis], run_id: str, *, stream: str = "train") -> Ledger:
    """The sum of a stream's books, from a client of each shard."""
    return total(read_ledger(client, shard_name(run_id, shard), stream=stream) for shard, client in enumerate(clients))


def audit_shards(clients: Sequence[redis.Redis], run_id: str, *, stream: str = "train") -> list[str]:
    """What contradicts a stream's books, each line with its shard where there are more than one."""
    found = [
        (shard, line)
        for shard, client in enumerate(clients)
        for line in audit(client, shard_name(run_id, shard), stream=stream)
    ]
    return [line if len(clients) == 1 else f"shard {shard}: {line}" for shard, line in found]
