"""Lag of tokens: what is measured of each bucket, and what the hard cap leaves out of a step and what it does not."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.common.config.config import load_config
from slipstream.common.records.trajectory import Trajectory, VersionSpan
from slipstream.learner.batch.batch import Batch
from slipstream.learner.learner import train_on
from slipstream.learner.model.critic import critic_shards
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.objective.lag import BUCKETS, bucket_of, by_lag, lag_metrics
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from tests.learner.even_game import TURNS, load_player, play
from tests.learner.policies import Tokens, any_batch

NEVER = torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize("lag", range(40))
def test_a_bucket_is_named_by_the_lags_in_it(lag: int) -> None:
    low, _, high = bucket_of(lag).partition("_")
    assert int(low) <= lag <= (math.inf if high == "up" else int(high or low))
    row = by_lag(torch.tensor([lag] * 4), torch.ones(4), clipped=NEVER, masked=NEVER)[BUCKETS.index(bucket_of(lag))]
    assert row.tolist() == [4, 4, 4, 0, 0]


@any_batch
def test_the_numbers_of_a_bucket_equal_a_count_token_by_token(tokens: Tokens) -> None:
    lags = torch.arange(len(tokens.current)) * 7 % 40
    ratios, clipped, masked = tokens.current.exp(), tokens.advantages > 0, tokens.advantages < -1
    found = lag_metrics(by_lag(lags, ratios, clipped=clipped, masked=masked).tolist())
    assert set(found) == {bucket_of(int(lag)) for lag in lags}
    for bucket, numbers in found.items():
        members = [place for place, lag in enumerate(lags.tolist()) if bucket_of(lag) == bucket]
        of_bucket = [float(ratios[place]) for place in members]
        square_of_mean = (sum(of_bucket) / len(members)) ** 2
        assert numbers.fraction == len(members) / len(lags)
        assert numbers.ratio_mean == pytest.approx(sum(of_bucket) / len(members))
        mean_of_squares = sum(ratio**2 for ratio in of_bucket) / len(members)
        assert numbers.effective_sample_size == pytest.approx(square_of_mean / mean_of_squares)
        assert numbers.clip_fraction == sum(bool(clipped[place]) for place in members) / len(members)
        assert numbers.masked_fraction == sum(bool(masked[place]) for place in members) / len(members)


def with_an_old_first_turn(trajectory: Trajectory) -> Trajectory:
    """Its first turn by version 5, of the checkpoint that a learner came back from as version 10; its last by 12."""
    turns = zip(TURNS, (5, 12), strict=True)
    spans = [VersionSpan(start=start, stop=stop, policy_version=version) for (start, stop), version in turns]
    return msgspec.structs.replace(trajectory, version_spans=spans)


def step_at(
    max_lag: int, model: Path, folder: Path, ranks: Ranks, *settings: str
) -> tuple[StepMetrics, dict[str, Tensor], dict[str, Tensor]]:
    """A step of the learner at version 12, two after 5: its metrics, and the policy and the critic after it."""
    sizes = [f"model.path={model}", f"replay.max_lag={max_lag}", "replay.target_lag=0", "optim.lr=3e-3"]
    sizes += ["learner.micro_batch_tokens=512", "objective.critic=own", "objective.allocation=per_turn"]
    config = load_config(None, [*sizes, *settings])
    learner, player = load_player(config, folder / f"at_{max_lag}", ranks)
    resumed = msgspec.structs.replace(learner.progress, policy_version=5).resumed_as(10)
    learner.progress = msgspec.structs.replace(resumed, policy_version=12)
    batch = play(learner, player)
    groups = [
        msgspec.structs.replace(group, trajectories=[with_an_old_first_turn(each) for each in group.trajectories])
        for group in batch.groups
    ]
    metrics = train_on(learner, Batch(groups=groups, num_dropped={}, next_group_id=9), Clock(ranks.device))
    policy = {name: tensor.clone() for name, tensor in full_tensors(learner.model)}
    critic = {name: shard.detach().full_tensor().clone() for name, shard in critic_shards(learner.models.critic)}
    return metrics, policy, critic


VTRACE = ("objective.advantage=vtrace", "objective.surrogate=policy_gradient", "objective.correction=none")


@pytest.mark.parametrize("settings", [("objective.advantage=gae",), VTRACE], ids=["gae", "vtrace"])
def test_old_tokens_train_the_critic_alone(tiny: Path, tmp_path: Path, ranks: Ranks, settings: tuple[str, ...]) -> None:
    whole, policy, critic = step_at(2, tiny, tmp_path, ranks, *settings)
    capped, capped_policy, capped_critic = step_at(1, tiny, tmp_path, ranks, *settings)
    assert (whole.masked_fraction, capped.masked_fraction) == (0.0, 0.5)
    assert capped.num_loss_tokens == whole.num_loss_tokens == 128
    for step, masked in ((whole, 0.0), (capped, 1.0)):
        assert {bucket: numbers.fraction for bucket, numbers in step.by_lag.items()} == {"0": 0.5, "2": 0.5}
        assert (step.by_lag["0"].masked_fraction, step.by_lag["2"].masked_fraction) == (0.0, masked)
    assert any(not torch.equal(capped_policy[name], tensor) for name, tensor in policy.items())
    assert all(torch.equal(capped_critic[name], tensor) for name, tensor in critic.items())
    assert whole.values == capped.values
