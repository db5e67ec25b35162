"""A learner that was suspended, and continues after another has taken over its run: it ends, and changes nothing."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import slipstream.learner.learner
from slipstream.common.config.config import load_config
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.lead import Lead
from slipstream.learner.learn import learn
from slipstream.learner.ranks.ranks import Ranks
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.keys import FencedOut, epoch_key
from slipstream.replay.run.archive import Archive
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.learner.lead.test_lead import START, Place, after, place
from tests.replay.records.attempts import make_buffer
from tests.tools.run.tiny_model import save_tiny_model

__all__ = ["place"]  # the fixture


def archive_one(place: Place, lead: Lead) -> None:
    lead.archive(Batch(groups=place.claim_one(lead, step=1), num_dropped={}, next_group_id=2), START)


def test_suspended_before_it_took_the_folder_it_leaves_it_to_its_successor(place: Place) -> None:
    with closing(place.join()) as suspended, closing(place.join()) as connections:
        successor = place.begin(connections)
        with closing(successor):
            with pytest.raises(FencedOut):
                Fence(place.dir.checkpoints).take(suspended.check_epochs)
            archive_one(place, successor)
            successor.prepare_checkpoint(after(1))()
        assert successor.connections.train.ledger().trained == 1


def test_suspended_after_it_took_the_folder_it_cuts_no_file_of_its_successor(place: Place) -> None:
    with closing(place.join()) as suspended, closing(place.join()) as connections:
        fence = place.taken()
        with closing(place.begin(connections)) as successor:
            archive_one(place, successor)
            place.play_and_record(successor, step=2, as_step=1)
            with pytest.raises(FencedOut, match="another learner has taken over"):
                place.begin(suspended, fence)
    assert Archive(place.dir.trajectories, place.run_id).steps == [1]
    assert [record["step"] for record in read_metrics(place.dir.metrics)] == [1]


def test_a_learner_that_was_replaced_does_not_set_the_state_of_the_run(place: Place) -> None:
    with closing(place.join()) as loading, closing(place.join()) as connections:
        replaced = place.begin(connections)
        with closing(replaced), closing(place.join()) as successor:
            successor.fleet.set_run_state(RunState.TRAINING)
            connections.give_up()
            loading.give_up()
            with pytest.raises(FencedOut, match=r"epoch \d+ has taken over: this one does not write the run's state"):
                replaced.finish()
            assert successor.fleet.run_state() is RunState.TRAINING
            place.client.set(epoch_key(place.run_id), "9" * 20)  # is malformed, and no newer learner
            successor.fleet.set_run_state(RunState.FINISHED)
            assert successor.fleet.run_state() is RunState.FINISHED


def test_a_learner_that_is_replaced_while_it_loads_its_model_ends_before_it_takes_the_folder(
    place: Place, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"model.path={save_tiny_model(tmp_path / 'model')}", f"run.name={place.run_id}", f"run.root={tmp_path}"]
    config = load_config(None, [*settings, f"redis.url='{place.redis_url}'"])
    shop_tokenizer().save_pretrained(tmp_path / "model")  # the learner describes it to actors
    load_kind = slipstream.learner.learner.load_kind

    def load_slowly(*arguments: Any, **named: Any) -> Any:
        make_buffer(place.client, place.run_id).learner.acquire_epoch()
        return load_kind(*arguments, **named)

    monkeypatch.setattr(slipstream.learner.learner, "load_kind", load_slowly)
    with pytest.raises(FencedOut):
        learn(config, place.dir, ranks=ranks, shutdown=Shutdown())
    assert place.dir.checkpoints.with_suffix(".writer").read_bytes() == b""
    assert Fleet(place.client, place.run_id).run_state() is RunState.STARTING
