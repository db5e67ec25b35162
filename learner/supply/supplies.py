"""Assigns shards to ranks, and merges a step's batch from all of them.

Rank r reads shards r, r + num_ranks, ...; each shard gives the same number of groups for every step.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.ranks.ranks import Ranks, share
from slipstream.learner.supply.refusals import Refusals
from slipstream.learner.supply.supply import Supply
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.run.diagnosis import Diagnosis

log = logging.getLogger(__name__)


def shards_of(rank: int, *, num_shards: int, num_ranks: int) -> range:
    """The shards that `rank` reads; empty for the last ranks if there are fewer shards than ranks."""
    return range(rank, num_shards, num_ranks)


class Supplies:
    """One `Supply` for each shard that this rank reads."""

    def __init__(
        self,
        buffers: Mapping[int, LearnerBuffer],
        config: Config,
        *,
        progress: Progress,
        refusals: Refusals | None = None,
        found: Callable[[], Diagnosis | None] = lambda: None,
    ) -> None:
        """Continue after `progress` and after every group that was opened; `buffers` are this rank's, by shard.

        See `Supply` for the others.
        """
        num_shards = config.redis.num_shards
        replay = dataclasses.replace(config.replay, groups_per_step=config.replay.groups_per_step // num_shards)
        part = dataclasses.replace(config, replay=replay)
        self._supplies = list[Supply]()
        for shard, buffer in buffers.items():
            first = max(progress.next_group_id, buffer.ledger().last_group_id + 1)
            first += (shard - first) % num_shards
            self._supplies.append(
                Supply(buffer, part, first_group_id=first, every=num_shards, refusals=refusals, found=found)
            )

    def next_batch(self, progress: Progress, shutdown: Shutdown) -> Batch | None:
        """This rank's part of the next batch; None if a stop was requested, or if this rank reads no shard.

        Raises SupplyDried, RedisAway.
        """
        batches = []
        try:
            for supply in self._supplies[1:]:  # so that actors find work on every shard while this waits for the first
                supply.admit(progress.step + 1, [], published_version=progress.highest_published)
            for supply in self._supplies:
                batch = supply.next_batch(progress, shutdown)
                if batch is None:
                    return None
                batches.append(batch)
        except RedisAway as error:
            if not shutdown.requested.is_set():
                raise
            log.warning("stopping without a batch, as requested: %s", error)
            return None
        return merged(batches) if batches else None


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a batch; None if it was asked to stop."""

    batch: Batch | None


def whole_batch(part: Batch | None, *, num_shards: int, ranks: Ranks) -> Batch | None:
    """Merge the ranks' parts into one batch, on every rank; None if one of them was asked to stop. Collective."""
    sources = range(min(ranks.num_ranks, num_shards))
    parts = [share(_Part(batch=part), _Part, ranks=ranks, source=source).batch for source in sources]
    whole = [found for found in parts if found is not None]
    return merged(whole) if len(whole) == len(parts) else None


def merged(batches: Sequence[Batch]) -> Batch:
    """Merge batches, ordered by group id, so that a step's result does not depend on which rank read which shard.

    Without groups if one of them has none: its shard is solved.
    """
    dropped: Counter[str] = Counter()
    for batch in batches:
        dropped.update(batch.num_dropped)
    return Batch(
        groups=sorted(
            (group for batch in batches for group in batch.groups if all(each.groups for each in batches)),
            key=lambda group: group.ticket.group_id,
        ),
        num_dropped=dict(dropped),
        dropped_returns=[value for batch in batches for value in batch.dropped_returns],
        next_group_id=max(batch.next_group_id for batch in batches),
    )
