"""The proximal policy: an average of the weights that answers in their place, and comes back from a checkpoint."""

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
import torch

from slipstream.common.config.config import load_config
from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.model_config import LoraConfig
from slipstream.learner.batch.pack import pack
from slipstream.learner.checkpoint import checkpoint
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.checkpoint_writer import CheckpointWriter
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.proximal import Proximal
from slipstream.learner.model.weight_shards import named_shards
from slipstream.learner.ranks.ranks import Ranks
from tests.learner import even_game
from tests.tools.run.tiny_model import FLOAT32, random_sequence

PROGRESS = Progress(step=1, policy_version=1, highest_published=1, next_group_id=0, tokens_trained=0)


def load(folder: Path, ranks: Ranks, *, lora_rank: int = 0) -> PackedModel:
    torch.manual_seed(0)
    return load_model(folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=LoraConfig(rank=lora_rank)))


@torch.no_grad()
def set_all(model: PackedModel, value: float) -> None:
    for _, shard in named_shards(model):
        if shard.requires_grad:
            shard.fill_(value)


def weights(model: PackedModel) -> dict[str, torch.Tensor]:
    return {name: shard.detach().full_tensor().clone() for name, shard in named_shards(model)}


def logprobs(model: PackedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(pack([random_sequence(20, seed=1)])).logprobs


def test_the_average_of_weights_1_4_and_4_is_3_571_with_a_decay_of_a_half(tiny: Path, ranks: Ranks) -> None:
    model = load(tiny, ranks)
    set_all(model, 1.0)
    proximal = Proximal(model, decay=0.5)
    expected = [
        (4 + 1 / 2) / 1.5,
        (4 + 4 / 2 + 1 / 4) / 1.75,
    ]  # every step's weights, half as much with each step since
    for average in expected:
        set_all(model, 4.0)
        proximal.after_step(model)
        for found in proximal.averages.values():
            torch.testing.assert_close(found.full_tensor(), torch.full_like(found.full_tensor(), average))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_average_answers_and_the_weights_are_restored(tiny: Path, ranks: Ranks, lora_rank: int) -> None:
    model = load(tiny, ranks, lora_rank=lora_rank)
    proximal = Proximal(model, decay=0.5)
    before = logprobs(model)
    with torch.no_grad():
        for _, shard in named_shards(model):
            if shard.requires_grad:
                shard.to_local().add_(torch.randn(shard.to_local().shape), alpha=0.3)
    moved = weights(model)
    packs = [pack([random_sequence(20, seed=1)]), pack([random_sequence(9, seed=2)])]
    found = proximal.logprobs(model, packs)
    torch.testing.assert_close(found[0], before, rtol=0, atol=1e-6)  # the average has not been moved yet
    assert (logprobs(model) - before).abs().max() > 1e-2
    assert all(torch.equal(value, moved[name]) for name, value in weights(model).items())


def test_a_run_without_a_proximal_policy_begins_one_at_its_checkpoint(tiny: Path, ranks: Ranks, tmp_path: Path) -> None:
    model, _ = trained(tiny, ranks)
    write(tmp_path, model, None, ranks)
    again = load(tiny, ranks)
    begun = Proximal(again, decay=0.5)
    begun.total.fill_(9.0)
    read(tmp_path, again, begun)
    expected = weights(model)
    assert float(begun.total) == 1.0
    for name, average in begun.averages.items():
        assert torch.equal(average.full_tensor(), expected[name])


DECOUPLED = ["objective.correction=decoupled", "objective.dual_clip=3", "objective.max_negative_kl=0", "optim.lr=1e-2"]


def test_the_clip_around_the_average_acts_and_a_resumed_run_agrees(tiny: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = load_config(None, [*DECOUPLED, f"model.path={tiny}", "learner.micro_batch_tokens=520"])
    learner, player = even_game.load_player(config, tmp_path, ranks)
    metrics, _ = even_game.train(learner, player, steps=2)
    even_game.save(learner)
    assert metrics[0].clip_fraction_high + metrics[0].clip_fraction_low == 0  # the average is the policy itself
    last, _ = even_game.train(learner, player, steps=1)
    assert last[0].clip_fraction_high + last[0].clip_fraction_low > 0.1
    again, player = even_game.load_player(config, tmp_path, ranks)
    assert again.progress.step == 2
    even_game.train(again, player, steps=1)
    expected = weights(learner.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again.model).items())


def trained(folder: Path, ranks: Ranks) -> tuple[PackedModel, Proximal]:
    model = load(folder, ranks)
    proximal = Proximal(model, decay=0.5)
    set_all(model, 0.1)
    proximal.after_step(model)
    return model, proximal


def write(path: Path, model: PackedModel, proximal: Proximal | None, ranks: Ranks) -> None:
    optimizer = make_optimizer(model, config=OptimConfig())
    schedule = make_schedule(optimizer, config=OptimConfig(), num_steps=10)
    with closing(CheckpointWriter(path, ranks=ranks, keep=1)) as checkpoints:
        checkpoints.begin(model, optimizer, schedule, proximal=proximal, progress=PROGRESS, once_durable=lambda: None)
        checkpoints.wait()


def read(path: Path, model: PackedModel, proximal: Proximal) -> None:
    optimizer = make_optimizer(model, config=OptimConfig())
    newest = checkpoint.latest_checkpoint(path)
    checkpoint.load(
        newest,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=OptimConfig(), num_steps=10),
        proximal=proximal,
    )
