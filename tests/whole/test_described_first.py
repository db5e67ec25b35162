"""The learner describes its run before it loads the model, which may take longer than actors wait for a run."""

from pathlib import Path

import pytest
import redis

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.learn import learn
from slipstream.learner.ranks.ranks import Ranks
from slipstream.replay.fleet.fleet import Fleet, RunState
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.tools.run.tiny_model import SCALING_VOCAB_SIZE, save_scaling_model


def test_a_run_whose_model_cannot_be_loaded_is_described_and_then_marked_as_failed(
    tmp_path: Path, ranks: Ranks, redis_url: str, redis_client: redis.Redis, run_id: str
) -> None:
    """Actors that read the description meanwhile wait for the next start, as after any error of the learner."""
    folder = tmp_path / "model"
    save_scaling_model(folder)  # whose packed sequences would get other log-probabilities
    shop_tokenizer().save_pretrained(folder)
    names = [f"model.path={folder}", f"run.name={run_id}", f"run.root={tmp_path}", f"redis.url='{redis_url}'"]
    config = load_config(None, names)
    with pytest.raises(ConfigError, match="cannot be trained here"):
        learn(config, RunDir(tmp_path, run_id), ranks=ranks, shutdown=Shutdown())
    facts = Fleet(redis_client, run_id).run_facts()
    assert (facts.model_path, facts.vocab_size) == (str(folder), SCALING_VOCAB_SIZE)
    assert "dtype: float32" in facts.config_yaml  # what "auto" means on this device: actors may have another
    assert Fleet(redis_client, run_id).run_state() is RunState.FAILED
