"""PPO with a critic, through the learner's own step: what it learns, what is kept, and what stays as it was."""

import dataclasses
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.common.config.config import Config, load_config
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.learner import Learner, train_on
from slipstream.learner.model.critic import critic_shards
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.objective.return_scale import ReturnScale
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step import StepBatch, StepSettings, train_step
from slipstream.learner.step.step_metrics import StepMetrics
from tests.learner.even_game import load_player, play, save, train, values_of
from tests.tools.run.tiny_model import random_sequence

PPO = ["objective.advantage=gae", "objective.allocation=per_turn", "optim.lr=3e-3", "optim.critic_lr=3e-3"]
PPO += ["learner.steps=30", "learner.micro_batch_tokens=512"]


def config_of(folder: Path, critic: str, *overrides: str) -> Config:
    return load_config(None, [f"model.path={folder}", *PPO, f"objective.critic={critic}", *overrides])


def policy_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(learner.model)}


def critic_of(learner: Learner) -> dict[str, Tensor]:
    policy_of(learner)  # which puts a shared trunk's shards back
    return {name: parameter.detach().full_tensor().clone() for name, parameter in critic_shards(learner.models.critic)}


def are_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    assert some.keys() == others.keys() and some
    return all(torch.equal(tensor, others[name]) for name, tensor in some.items())


@pytest.mark.parametrize(("critic", "critic_lr"), [("own", 3e-3), ("shared", 2e-2)])
def test_ppo_learns_a_simple_game_and_its_critic_what_it_is_worth(
    tiny: Path, tmp_path: Path, ranks: Ranks, critic: str, critic_lr: float
) -> None:
    learner, player = load_player(config_of(tiny, critic, f"optim.critic_lr={critic_lr}"), tmp_path, ranks)
    metrics, rewards = train(learner, player, steps=12)
    values = [step.values for step in metrics if step.values is not None]
    assert np.mean(rewards[:2]) < 2.6 < 3.0 < np.mean(rewards[-2:])  # of 4, when every token is even
    assert values[-1].loss < values[1].loss / 1.5
    assert values[0].mean == values[0].explained_variance == 0  # a value head of zeros knows nothing
    assert values[-1].explained_variance > 0.5


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_in_the_critics_warm_up_the_policy_stays(tiny: Path, tmp_path: Path, ranks: Ranks, critic: str) -> None:
    config = config_of(tiny, critic, "objective.critic_warmup_steps=2", "optim.schedule=linear")
    learner, player = load_player(config, tmp_path, ranks)
    policy, value = policy_of(learner), critic_of(learner)
    metrics, _ = train(learner, player, steps=2)
    assert are_equal(policy_of(learner), policy)
    assert not are_equal(critic_of(learner), value)
    assert [step.lr for step in metrics] == [0, 0] and not any(step.skipped for step in metrics)
    assert (learner.progress.step, learner.progress.policy_version, learner.models.schedule.last_epoch) == (2, 2, 0)
    (following,), _ = train(learner, player, steps=1)
    assert following.lr == 3e-3  # its schedule begins when the policy does
    assert not are_equal(policy_of(learner), policy)


@pytest.mark.parametrize(("warmup_steps", "is_said"), [(2, False), (3, True)])
def test_a_learning_rate_whose_warm_up_never_ends_is_said_at_the_start(
    tiny: Path, tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture, warmup_steps: int, is_said: bool
) -> None:
    steps = ["learner.steps=5", "objective.critic_warmup_steps=2", f"optim.warmup_steps={warmup_steps}"]
    load_player(config_of(tiny, "own", *steps), tmp_path, ranks)
    expected = "`optim.warmup_steps` is 3, but the policy learns in 3 steps: its learning rate never reaches `optim.lr`"
    assert any(message.startswith(expected) for message in caplog.messages) == is_said


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_a_resumed_learner_reaches_the_same_bits(tiny: Path, tmp_path: Path, ranks: Ranks, critic: str) -> None:
    config = config_of(tiny, critic, "optim.schedule=linear", "objective.critic_warmup_steps=1")
    learner, player = load_player(config, tmp_path, ranks)
    train(learner, player, steps=2)
    save(learner)
    train(learner, player, steps=2)
    resumed, player = load_player(config, tmp_path, ranks)
    assert resumed.progress.step == 2
    train(resumed, player, steps=2)
    assert are_equal(policy_of(resumed), policy_of(learner)) and are_equal(critic_of(resumed), critic_of(learner))
    assert resumed.models.critic.scale == learner.models.critic.scale != ReturnScale()
    assert resumed.models.critic.schedule.last_epoch == 4


def hotter(batch: Batch) -> Batch:
    """The batch as if it had been sampled at another temperature than it was: its ratios are not 1."""
    replace, groups = msgspec.structs.replace, []
    for group in batch.groups:
        hot = [replace(each, sampling=replace(each.sampling, temperature=1.3)) for each in group.trajectories]
        groups.append(replace(group, trajectories=hot))
    return replace(batch, groups=groups)


def test_a_step_that_the_guard_refuses_leaves_the_critic_alone(
    tiny: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.objective.guard.MAX_RATIO", 1.0000000001)
    learner, player = load_player(config_of(tiny, "own"), tmp_path, ranks)
    policy, value = policy_of(learner), critic_of(learner)
    step = train_on(learner, hotter(play(learner, player)), Clock(ranks.device))
    assert step.skipped and step.guard_scale == 0 and step.values is not None and step.values.lr == 0
    assert are_equal(policy_of(learner), policy) and are_equal(critic_of(learner), value)
    assert learner.models.critic is not None and learner.models.critic.scale == ReturnScale()
    assert learner.models.critic.schedule.last_epoch == 0


def test_a_critics_gradient_that_is_not_finite_skips_the_policys_step(tiny: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(tiny, "own", "objective.guard=false")
    learner, _ = load_player(config, tmp_path, ranks)
    policy, value = policy_of(learner), critic_of(learner)

    def step_towards(target: float) -> StepMetrics:
        per_token = {"old_values": np.zeros(20, np.float32), "returns": np.full(20, target, np.float32)}
        sequence = dataclasses.replace(random_sequence(20, seed=1), **per_token)
        batch = StepBatch(micro_batches=[pack([sequence])], num_loss_tokens=17, num_trajectories=1)
        settings = StepSettings(objective=config.objective, max_grad_norm=1.0)
        return train_step(learner.models, batch, settings=settings, ranks=ranks)

    refused = step_towards(math.inf)
    assert refused.skipped and refused.guard_scale == 1 and math.isfinite(refused.grad_norm)
    assert are_equal(policy_of(learner), policy) and are_equal(critic_of(learner), value)
    assert not step_towards(1.0).skipped
    assert not are_equal(policy_of(learner), policy) and not are_equal(critic_of(learner), value)


def test_values_return_to_their_tokens_for_any_packing(tiny: Path, tmp_path: Path, ranks: Ranks) -> None:
    learner, player = load_player(config_of(tiny, "own"), tmp_path, ranks)
    train(learner, player, steps=2)  # until then every value is 0
    trajectories = [t for group in play(learner, player).groups for t in group.trajectories]
    sequences = [s for n, t in enumerate(trajectories) for s in sequences_of(t, advantage=0.0) if n % 3]

    alone = np.concatenate([values_of(learner, [sequence], micro_batch_tokens=7) for sequence in sequences])
    assert np.ptp(alone) > 0.1
    for micro_batch_tokens in (7, 30, 512):
        found = values_of(learner, sequences, micro_batch_tokens=micro_batch_tokens)
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-5)
