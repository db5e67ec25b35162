"""A rank other than 0: it takes part in what is collective, and leaves the rest to rank 0."""

from collections.abc import Callable

from slipstream.common.process.connection import connect_shards
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.evaluation import Evaluation
from slipstream.learner.learner import Learner
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.ranks.ranks import share
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.run.server_shards import Epochs


class Follower:
    """Has the methods of `Connections` and `Lead` that every rank calls."""

    publisher: Publisher | None = None
    refusals: Refusals | None = None

    def _nothing(self, *_: object) -> None:
        """Only rank 0 does this."""

    check_epochs = give_up = train_from_here = reserve_version = archive = record_step = found = _nothing
    evaluate_once = evaluate_regularly = write_summary = finish = fail = close = _nothing

    def with_fresh_version(self, progress: Progress) -> Progress:
        """`progress` as it is: rank 0 chooses the version, and shares it."""
        return progress

    def buffers(self, shards: range, *, learner: Learner, shutdown: Shutdown) -> dict[int, LearnerBuffer]:
        """Connect to `shards` of the training stream, with the epochs that rank 0 has acquired. Collective."""
        acquired = share(None, Epochs, ranks=learner.ranks)
        if not shards:
            return {}
        config, vocab_size = learner.config, learner.model.vocab_size
        clients = connect_shards(config.redis.url, config.redis.shards, ending=shutdown.requested)
        buffers = {
            shard: LearnerBuffer(clients[shard], config.run.name, config.replay, vocab_size=vocab_size, shard=shard)
            for shard in shards
        }
        for shard, buffer in buffers.items():
            buffer.adopt_epoch(acquired.epochs[shard])
        return buffers

    def prepare_checkpoint(self, _: Progress) -> Callable[[], None]:
        return lambda: None

    def open_evaluation(self, _: Progress) -> Evaluation | None:
        return None

    def close_evaluation(self, *_: object) -> bool:
        return True
