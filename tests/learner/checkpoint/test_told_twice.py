"""A resumed learner that is stopped before it made a step keeps the checkpoint that it resumed from."""

from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.checkpoint.checkpoint import latest_checkpoint
from slipstream.learner.lead.tally import Tally, save_tally
from slipstream.learner.learn import learn
from slipstream.learner.ranks.ranks import Ranks
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.learner.even_game import load_player, save, train
from tests.tools.run.tiny_model import save_tiny_model


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_only_checkpoint_is_not_written_again(
    num_steps: int, tmp_path: Path, ranks: Ranks, redis_url: str, run_id: str
) -> None:
    """For a moment there would be no checkpoint, although the groups that it covers are settled."""
    settings = [f"model.path={save_tiny_model(tmp_path / 'model')}", f"run.name={run_id}", f"run.root={tmp_path}"]
    settings += [f"redis.url='{redis_url}'", "learner.keep_checkpoints=1", "learner.steps=50"]
    config = load_config(None, settings)
    shop_tokenizer().save_pretrained(tmp_path / "model")  # the learner describes it to actors
    run_dir = RunDir(tmp_path, run_id)
    run_dir.create()
    run_dir.start_clock()
    learner, player = load_player(config, tmp_path, ranks)
    train(learner, player, steps=num_steps)
    save(learner)
    save_tally(Tally(durable_step=num_steps), run_dir.tally)
    learner.checkpoints.close()
    written = {path: path.stat().st_ino for path in run_dir.checkpoints.glob("*/*")}
    assert len(written) >= 2
    told = Shutdown()
    told.requested.set()
    assert not learn(config, run_dir, ranks=ranks, shutdown=told)
    assert latest_checkpoint(run_dir.checkpoints) is not None
    assert {path: path.stat().st_ino for path in run_dir.checkpoints.glob("*/*")} == written
