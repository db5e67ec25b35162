"""A learner that is told to stop again before it made a step leaves the checkpoint that it came from alone."""

from pathlib import Path

import pytest

from common.config import load_config
from common.run_dir import RunDir
from common.shutdown import Shutdown
from learner.checkpoint import latest_checkpoint
from learner.learn import learn
from learner.ranks import Ranks
from tests.even_game import load_player, save, train
from tests.tiny_model import save_tiny_model


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_only_checkpoint_is_not_written_anew(
    num_steps: int, tmp_path: Path, ranks: Ranks, redis_url: str, run_id: str
) -> None:
    """For a moment there would be none, and what it covers is settled already."""
    config = load_config(
        None,
        [f"model.path={save_tiny_model(tmp_path / 'model')}", f"run.name={run_id}", f"run.root={tmp_path}",
         f"redis.url='{redis_url}'", "learner.keep_checkpoints=1", "learner.steps=50"],
    )  # fmt: skip
    run_dir = RunDir(tmp_path, run_id)
    run_dir.create()
    learner, player = load_player(config, tmp_path, ranks)
    train(learner, player, steps=num_steps)
    save(learner)
    learner.checkpoints.close()
    written = {path: path.stat().st_ino for path in run_dir.checkpoints.glob("*/*")}
    assert len(written) >= 2
    told = Shutdown()
    told.requested.set()
    assert not learn(config, run_dir, ranks=ranks, shutdown=told)
    assert latest_checkpoint(run_dir.checkpoints) is not None
    assert {path: path.stat().st_ino for path in run_dir.checkpoints.glob("*/*")} == written
