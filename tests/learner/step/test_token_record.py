"""What a step did with each of its sampled tokens is recorded as the loss computed it, and bounded."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.common.config.config import load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import Bin
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.credit.token_advantages import sequences_with_advantages
from slipstream.learner.learner import train_on
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.loss import PolicyLoss, policy_loss
from slipstream.learner.step.token_recorder import record_tokens
from slipstream.replay.records.step_tokens import CLIPPED, LEFT_OUT, TRAINED, SequenceTokens, read_tokens
from tests.learner.even_game import TURNS, load_player, play
from tests.learner.policies import loss_tokens, of_lengths

SETTINGS = ["replay.max_lag=4", "replay.target_lag=0", "optim.lr=3e-3"]
SETTINGS += ["learner.micro_batch_tokens=64", "model.max_tokens=64"]
NUM_SAMPLED = sum(stop - start for start, stop in TURNS)


def ratios_of(parts: list[SequenceTokens]) -> np.ndarray:
    return np.concatenate([np.frombuffer(part.ratios, np.float16) for part in parts]).astype(np.float64)


def test_each_token_of_a_step_is_recorded_as_the_metrics_sum_it_up(tiny: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = load_config(None, [f"model.path={tiny}", "run.name=traced", *SETTINGS])
    learner, player = load_player(config, tmp_path, ranks)
    batch = play(learner, player)
    seen = set[int]()
    for step in (1, 2, 3):  # the same episodes again: from the second step on they are another policy's
        metrics = train_on(learner, batch, Clock(ranks.device))
        recorded = read_tokens(learner.run_dir.tokens, step=step, policy_version=step - 1)
        parts = [part for found in recorded.values() for part in found]
        assert len(recorded) == 32 and {len(part.fates) for part in parts} == {NUM_SAMPLED}
        assert ratios_of(parts).mean() == pytest.approx(metrics.ratio_mean, abs=2e-3)
        fates = np.concatenate([np.frombuffer(part.fates, np.uint8) for part in parts])
        assert (fates == LEFT_OUT).mean() == metrics.masked_fraction
        clipped = metrics.clip_fraction_high + metrics.clip_fraction_low
        assert (fates == CLIPPED).mean() <= clipped + 1e-9 <= (fates != TRAINED).mean() + 1e-6  # some are both
        seen |= set(fates.tolist())
    assert np.ptp(ratios_of(parts)) > 0.01 and seen == {TRAINED, CLIPPED, LEFT_OUT}
    members = [member for group in batch.groups for member in group.trajectories]
    sequences = sequences_with_advantages(batch.groups, objective=config.objective)
    for member, sequence in zip(members, sequences, strict=True):
        (part,) = recorded[member.group_id, member.member]
        expected = sequence.advantages[sequence.loss_mask]
        assert np.frombuffer(part.advantages, np.float16) == pytest.approx(expected, abs=2e-3)


def loss_of(ratios: torch.Tensor) -> PolicyLoss:
    """The loss of a sequence whose tokens have these ratios of current to behaviour."""
    tokens = loss_tokens(ratios.log() - 5, torch.full_like(ratios, -5), ratios, sequences=of_lengths(len(ratios)))
    return policy_loss(tokens, objective=ObjectiveConfig())


def test_ranks_record_their_tokens_up_to_a_bound(
    tiny: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [f"model.path={tiny}", *SETTINGS])
    batch: Batch = play(*load_player(config, tmp_path, ranks), num_groups=1, group_size=4)
    sequences = sequences_with_advantages(batch.groups, objective=config.objective)
    before = Progress(step=6, policy_version=9, highest_published=9, next_group_id=0, tokens_trained=0)
    monkeypatch.setattr("slipstream.learner.step.token_recorder.MAX_TOKENS", NUM_SAMPLED * 2 + 1)
    run_dir = RunDir(tmp_path, "ranks")
    for rank, members in ((0, [[2], [0, 1]]), (1, [[3]])):
        bins = [Bin(members=each, share_prefixes=False) for each in members]
        losses = [loss_of(torch.tensor([[1.0 + index] * NUM_SAMPLED for index in each]).flatten()) for each in members]
        record_tokens(run_dir, batch, sequences, bins=bins, losses=losses, before=before, rank=rank)
    recorded = read_tokens(run_dir.tokens, step=7, policy_version=9)
    assert {member: set(ratios_of(parts)) for (_, member), parts in recorded.items()} == {2: {3.0}, 0: {1.0}, 3: {4.0}}
    assert not read_tokens(run_dir.tokens, step=7, policy_version=8)
