"""A learner that was suspended, and continues after another has taken over its run: it ends, and changes nothing."""

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

import slipstream.learner.learner
from slipstream.common.config.config import load_config
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.lead import Lead
from slipstream.learner.learn import learn
from slipstream.learner.ranks.ranks import Ranks
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.keys import FencedOut, epoch_key
from slipstream.replay.run.archive import Archive
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.learner.lead.test_lead import START, actor, begin_with, claim_one, join, play_and_record, taken
from tests.replay.records.attempts import make_buffer
from tests.tools.run.tiny_model import save_tiny_model

__all__ = ["actor"]  # the fixture


def archive_one(lead: Lead, actor: ActorBuffer, run_id: str) -> None:
    groups = claim_one(lead, actor, run_id, step=1)
    lead.archive(Batch(groups=groups, num_dropped={}, next_group_id=2), START)


@pytest.fixture
def run_dir(tmp_path: Path, run_id: str) -> RunDir:
    run_dir = RunDir(tmp_path, run_id)
    run_dir.create()
    return run_dir


def test_suspended_before_it_took_the_folder_it_leaves_it_to_its_successor(
    redis_client: redis.Redis,
    redis_url: str,
    run_id: str,
    run_dir: RunDir,
    actor: ActorBuffer,
) -> None:
    with closing(join(redis_client, run_id)) as suspended, closing(join(redis_client, run_id)) as connections:
        successor = begin_with(connections, taken(run_dir), redis_url, run_dir, progress=START)
        with closing(successor):
            with pytest.raises(FencedOut):
                Fence(run_dir.checkpoints).take(suspended.check_epochs)
            archive_one(successor, actor, run_id)
            successor.prepare_checkpoint(msgspec.structs.replace(START, step=1))()
        assert successor.shards[0].ledger().trained == 1


def test_suspended_after_it_took_the_folder_it_cuts_no_file_of_its_successor(
    redis_client: redis.Redis,
    redis_url: str,
    run_id: str,
    run_dir: RunDir,
    actor: ActorBuffer,
) -> None:
    with closing(join(redis_client, run_id)) as suspended, closing(join(redis_client, run_id)) as connections:
        fence = taken(run_dir)
        with closing(begin_with(connections, taken(run_dir), redis_url, run_dir, progress=START)) as successor:
            archive_one(successor, actor, run_id)
            play_and_record(successor, actor, run_id, step=2, as_step=1)
            with pytest.raises(FencedOut, match="another learner has taken over"):
                begin_with(suspended, fence, redis_url, run_dir, progress=START)
    assert Archive(run_dir.trajectories, run_id).steps == [1]
    assert [record["step"] for record in read_metrics(run_dir.metrics)] == [1]


def test_a_learner_that_was_replaced_does_not_set_the_state_of_the_run(
    redis_client: redis.Redis, redis_url: str, run_id: str, run_dir: RunDir
) -> None:
    with closing(join(redis_client, run_id)) as loading, closing(join(redis_client, run_id)) as connections:
        replaced = begin_with(connections, taken(run_dir), redis_url, run_dir, progress=START)
        with closing(replaced), closing(join(redis_client, run_id)) as successor:
            successor.fleet.set_run_state(RunState.TRAINING)
            replaced.fail()
            loading.give_up()
            with pytest.raises(FencedOut, match=r"epoch \d+ has taken over: this one does not write the run's state"):
                replaced.finish()
            assert successor.fleet.run_state() is RunState.TRAINING
            redis_client.set(epoch_key(run_id), "9" * 20)  # is malformed, and no newer learner
            successor.fleet.set_run_state(RunState.FINISHED)
            assert successor.fleet.run_state() is RunState.FINISHED


def test_a_learner_that_is_replaced_while_it_loads_its_model_ends_before_it_takes_the_folder(
    tmp_path: Path,
    ranks: Ranks,
    redis_client: redis.Redis,
    redis_url: str,
    run_id: str,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = [f"model.path={save_tiny_model(tmp_path / 'model')}", f"run.name={run_id}", f"run.root={tmp_path}"]
    config = load_config(None, [*settings, f"redis.url='{redis_url}'"])
    shop_tokenizer().save_pretrained(tmp_path / "model")  # the learner describes it to actors
    load_kind = slipstream.learner.learner.load_kind

    def load_slowly(*arguments: Any, **named: Any) -> Any:
        make_buffer(redis_client, run_id).learner.acquire_epoch()
        return load_kind(*arguments, **named)

    monkeypatch.setattr(slipstream.learner.learner, "load_kind", load_slowly)
    with pytest.raises(FencedOut):
        learn(config, run_dir, ranks=ranks, shutdown=Shutdown())
    assert run_dir.checkpoints.with_suffix(".writer").read_bytes() == b""
    assert Fleet(redis_client, run_id).run_state() is RunState.STARTING
