"""Rank 0's connections to the run: the buffers of each stream and shard, the fleet, the offers, and who leads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from common.config import Config, dump_config
from learner.evaluation import STREAM as EVAL_STREAM
from replay.buffer import Buffer
from replay.bulletin import Bulletin
from replay.fleet import Fleet, RunFacts, RunState
from replay.repertoire import Repertoire
from replay.shards import Epochs, Shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Rank 0's connections to the run."""

    train: Buffer  # the first shard
    shards: Shards
    evaluation: Buffer
    fleet: Fleet
    bulletin: Bulletin
    repertoires: list[Repertoire]  # of each server
    epochs: Epochs  # of each shard
    epoch: int  # of the first, which fences what is published


def join_run(
    client: redis.Redis,
    config: Config,
    *,
    model_folder: Path,
    vocab_size: int,
    further: Sequence[redis.Redis] = (),
) -> Links:
    """Become the run's learner: older ones are fenced out from here on, and actors may join.

    `further` are the clients of `redis.shards`.
    """
    run_id, clients = config.run.name, [client, *further]
    shards = Shards(
        [shard_buffer(each, config, vocab_size=vocab_size, shard=shard) for shard, each in enumerate(clients)]
    )
    evaluation, fleet = shard_buffer(client, config, vocab_size=vocab_size, stream=EVAL_STREAM), Fleet(client, run_id)
    repertoires = [Repertoire(each) for each in dict.fromkeys(clients)]
    epochs = shards.acquire_epochs()
    evaluation.adopt_epoch(epochs.epochs[0])
    # In this order: actors that wait for a learner which failed take the facts as soon as it is starting.
    fleet.describe_run(
        RunFacts(config_yaml=dump_config(config), model_path=str(model_folder.resolve()), vocab_size=vocab_size)
    )
    fleet.set_run_state(RunState.STARTING)
    return Links(
        train=shards.buffers[0],
        shards=shards,
        evaluation=evaluation,
        fleet=fleet,
        bulletin=Bulletin(client, run_id),
        repertoires=repertoires,
        epochs=epochs,
        epoch=epochs.epochs[0],
    )


def shard_buffer(
    client: redis.Redis, config: Config, *, vocab_size: int, stream: str = "train", shard: int = 0
) -> Buffer:
    """The buffer of a stream, or of a shard of it, as the run has configured it."""
    return Buffer(
        client,
        config.run.name,
        stream=stream,
        shard=shard,
        vocab_size=vocab_size,
        lease_ttl_s=config.replay.lease_ttl_s,
        max_attempts=config.replay.max_attempts,
        max_trajectory_bytes=config.replay.max_trajectory_bytes,
    )
