import dataclasses
from pathlib import Path

import pytest
import torch

from slipstream.common.config.learner_config import WarmStartConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.warm_start import imitate
from tests.learner.even_game import recorded
from tests.tools.run.tiny_model import FLOAT32


def expert_episode(task: int) -> Trajectory:
    """A prompt that names the task, and an answer that is the task's number four times."""
    return recorded([1, 100 + task, *[10 + task] * 4], [0.0] * 6, [False] * 2 + [True] * 4)


def imitate_and_watch(model: PackedModel, ranks: Ranks, config: WarmStartConfig, *, repeats: int = 1) -> list[float]:
    episodes = [expert_episode(task) for task in range(16)] * repeats
    return list(imitate(model, episodes, config=config, ranks=ranks, seed=0, micro_batch_tokens=32))


def test_imitation_teaches_the_experts_tokens(tiny: Path, ranks: Ranks) -> None:
    model = load_model(tiny, ranks=ranks, settings=FLOAT32)
    losses = imitate_and_watch(model, ranks, WarmStartConfig(episodes=16, batch_tokens=48, lr=3e-3), repeats=12)
    # Twelve times 96 tokens, in steps of 48.
    assert len(losses) == 24
    assert losses[0] > 3
    with torch.no_grad():
        assert model(pack(sequences_of(expert_episode(3), advantage=0.0))).logprobs.mean() > -0.5


def test_the_same_seed_gives_the_same_losses(tiny: Path, ranks: Ranks) -> None:
    config = WarmStartConfig(episodes=16, batch_tokens=24, lr=1e-3)
    models = (load_model(tiny, ranks=ranks, settings=FLOAT32) for _ in range(2))
    first, second = (imitate_and_watch(model, ranks, config) for model in models)
    assert len(first) == 4 and first == second


def test_the_first_loss_is_the_mean_over_loss_tokens_at_temperature_1(tiny: Path, ranks: Ranks) -> None:
    hotter = dataclasses.replace(FLOAT32, temperature=1.7)
    model, hot = (load_model(tiny, ranks=ranks, settings=settings) for settings in (FLOAT32, hotter))
    packed = pack([part for task in range(16) for part in sequences_of(expert_episode(task), advantage=0.0)])
    with torch.no_grad():
        expected = -float(model(packed).logprobs.mean())
    (loss,) = imitate_and_watch(hot, ranks, WarmStartConfig(episodes=16, batch_tokens=96))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert hot.settings.temperature == 1.7


def test_nothing_to_imitate_is_refused(tiny: Path, ranks: Ranks) -> None:
    model = load_model(tiny, ranks=ranks, settings=FLOAT32)
    with pytest.raises(ConfigError, match=r"`warm_start.episodes` is 4, but the run's demonstrations have no episode"):
        next(imitate(model, [], config=WarmStartConfig(episodes=4), ranks=ranks, seed=0, micro_batch_tokens=32))
