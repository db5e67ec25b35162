"""Rank 0's connections to the run: a buffer of each stream, fleet, bulletin, and this learner's epoch."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import redis

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.connection import connect
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root
from slipstream.common.transfer.model_folder import ModelFile, model_files
from slipstream.envhub.own_modules import own_modules
from slipstream.learner.lead.evaluation import STREAM as EVAL_STREAM
from slipstream.learner.model.skeleton import vocab_size_of
from slipstream.replay.buffer.learner_buffer import LearnerBuffer
from slipstream.replay.buffer.repertoire import Repertoire
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, RunFacts, RunState
from slipstream.replay.records.keys import FencedOut


@dataclass(frozen=True, kw_only=True, slots=True)
class Connections:
    """Rank 0's connections to the run."""

    client: redis.Redis
    train: LearnerBuffer
    evaluation: LearnerBuffer
    fleet: Fleet
    bulletin: Bulletin
    repertoire: Repertoire
    epoch: int  # that publishing checks
    model_files: list[ModelFile]  # that actors on other hosts pull

    def check_epochs(self) -> None:
        """Raise FencedOut if another learner has taken over the run."""
        self.train.settle(0)  # no group is claimed for step 0: this only compares the epochs

    def give_up(self) -> None:
        """Set the run's state to FAILED, unless another learner has taken over: actors wait for another start."""
        with contextlib.suppress(RedisAway, FencedOut):
            self.fleet.set_run_state(RunState.FAILED)
        self.close()

    def close(self) -> None:
        """Stop its thread. Idempotent."""
        self.repertoire.close()


def join(config: Config, run_dir: RunDir, shutdown: Shutdown) -> Connections:
    """Become the run's learner before the model is loaded: actors load theirs meanwhile. Raises ConfigError."""
    folder = Path(config.model.path or run_dir.model)
    facts = RunFacts(
        config_yaml=dump_config(config),
        model_path=str(folder.resolve()),
        vocab_size=vocab_size_of(folder),
        # Actors pull whole weights as a version, but adapters need the folder's.
        model_files=model_files(folder, with_weights=config.model.lora.rank > 0),
        tokenizer_root=tokenizer_root(load_tokenizer(folder, config.model.template_arguments)),
        own_modules=own_modules(config.env),
    )
    return join_run(connect(config.redis.url, ending=shutdown.requested), config, facts)


def join_run(client: redis.Redis, config: Config, facts: RunFacts) -> Connections:
    """Become the run's learner: from now on older learners are fenced out, and actors may join."""
    run_id, vocab_size = config.run.name, facts.vocab_size
    train = LearnerBuffer(client, run_id, config.replay, vocab_size=vocab_size)
    evaluation = LearnerBuffer(client, run_id, config.replay, vocab_size=vocab_size, stream=EVAL_STREAM)
    fleet = Fleet(client, run_id)
    repertoire = Repertoire(client)
    epoch = train.acquire_epoch()
    evaluation.adopt_epoch(epoch)
    fleet.adopt_epoch(epoch)
    # In this order: actors that wait after a learner failed read the facts as soon as the state is STARTING.
    fleet.describe_run(facts)
    fleet.set_run_state(RunState.STARTING)
    fleet.report_step({})
    return Connections(
        client=client,
        train=train,
        evaluation=evaluation,
        fleet=fleet,
        bulletin=Bulletin(client, run_id),
        repertoire=repertoire,
        epoch=epoch,
        model_files=facts.model_files,
    )
