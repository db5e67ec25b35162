"""The next batch of every rank: rank 0 claims it, and the others receive it."""

import logging

import msgspec

from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.ranks.ranks import Ranks, share
from slipstream.learner.supply.supply import Supply

log = logging.getLogger(__name__)


class _Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has claimed; None if it was asked to stop."""

    batch: Batch | None


def shared_batch(supply: Supply | None, progress: Progress, shutdown: Shutdown, *, ranks: Ranks) -> Batch | None:
    """The batch of the step after `progress`, on every rank; None if rank 0 was asked to stop. Collective.

    Only rank 0 has a `supply`. Raises SupplyDried, RedisAway.
    """
    batch = claimed_batch(supply, progress, shutdown) if supply else None
    return share(_Claimed(batch=batch), _Claimed, ranks=ranks).batch


def claimed_batch(supply: Supply, progress: Progress, shutdown: Shutdown) -> Batch | None:
    """The supply's next batch; None if a stop was requested, even while Redis does not answer."""
    try:
        return supply.next_batch(progress, shutdown)
    except RedisAway as error:
        if not shutdown.requested.is_set():
            raise
        log.warning("stopping without a batch, as requested: %s", error)
        return None
