"""Which shards a rank reads, and how a step's batch comes together from all of them.

Rank r reads shards r, r + num_ranks, ...; each gives the same share of the groups of every step.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from common.config import Config
from common.patience import RedisAway
from common.shutdown import Shutdown
from learner.checkpoint import Progress
from learner.ranks import Ranks
from learner.share import share
from learner.supply import Batch, Supply
from replay.buffer import Buffer

log = logging.getLogger(__name__)


def shards_of(rank: int, *, num_shards: int, num_ranks: int) -> range:
    """The shards that `rank` reads; none where there are fewer shards than ranks."""
    return range(rank, num_shards, num_ranks)


class Supplies:
    """One supply for each shard that this rank reads."""

    def __init__(
        self, buffers: Mapping[int, Buffer], config: Config, *, progress: Progress, skipped_versions: int = 0
    ) -> None:
        """`buffers` are this rank's, by shard. A resumed learner leaves `skipped_versions` out, between that of its
        checkpoint and its first: no step made them.
        """
        self._first_version = progress.policy_version
        self._skipped_versions = skipped_versions
        self._max_lag = config.replay.max_lag
        num_shards = config.redis.num_shards
        replay = dataclasses.replace(config.replay, groups_per_step=config.replay.groups_per_step // num_shards)
        part = dataclasses.replace(config, replay=replay)
        self._supplies = []
        for shard, buffer in buffers.items():
            first = max(progress.next_group_id, buffer.ledger().last_group_id + 1)
            first += (shard - first) % num_shards
            self._supplies.append(Supply(buffer, part, first_group_id=first, every=num_shards))

    def next_batch(self, progress: Progress, shutdown: Shutdown) -> Batch | None:
        """This rank's part of the groups of the next step; None when told to stop. Raises SupplyDried, RedisAway."""
        step, published = progress.step + 1, progress.highest_published
        batches = []
        try:
            for supply in self._supplies[1:]:  # actors find work on each while the first is waited for
                supply.admit(step, [], published_version=published)
            for supply in self._supplies:
                batch = supply.next_batch(
                    step,
                    policy_version=progress.policy_version,
                    published_version=published,
                    shutdown=shutdown,
                    skipped_versions=self._skipped_at(progress.policy_version),
                )
                if batch is None:
                    return None
                batches.append(batch)
        except RedisAway as error:
            if not shutdown.requested.is_set():
                raise
            log.warning("told to stop, without a batch: %s", error)
            return None
        return merged(batches)

    def _skipped_at(self, policy_version: int) -> int:
        """The skipped versions, while there may be groups from before them. Once a group of this life could be too old,
        those were claimed long ago."""
        none_too_old = policy_version - self._max_lag <= self._first_version
        return self._skipped_versions if none_too_old else 0


def whole_batch(part: Batch | None, *, num_shards: int, ranks: Ranks) -> Batch | None:
    """The batch that the ranks' parts make, on every rank; None when one of them was told to stop. Collective."""
    sources = range(min(ranks.num_ranks, num_shards))
    parts = [
        share(part if ranks.rank == source else None, Batch, ranks=ranks, source=source) for source in sources
    ]  # fmt: skip
    whole = [found for found in parts if found is not None]
    return merged(whole) if len(whole) == len(parts) else None


def merged(batches: Sequence[Batch]) -> Batch:
    """One batch, by group id, so that a step's arithmetic does not depend on who read which shard."""
    if len(batches) == 1:
        return batches[0]
    dropped: Counter[str] = Counter()
    for batch in batches:
        dropped.update(batch.num_dropped)
    return Batch(
        groups=sorted((group for batch in batches for group in batch.groups), key=lambda group: group.ticket.group_id),
        num_dropped=dict(dropped),
        next_group_id=max(batch.next_group_id for batch in batches),
    )
