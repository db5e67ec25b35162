"""The study of corrections: what an expert would have written is imitated where the policy acted."""

import asyncio
from pathlib import Path

from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.study import correction
from slipstream.tools.lab.study.run import practice, warm_start

SETTINGS = (
    *("warm_start.episodes=4", "eval.num_tasks=4", "replay.group_size=2", "replay.groups_per_step=8"),
    *("model.tiny.hidden_size=32", "model.tiny.num_layers=1", "model.tiny.num_heads=1", "model.tiny.num_kv_heads=1"),
)


def test_a_short_study_of_corrections_counts_the_tokens_of_the_policys_episodes(ranks: Ranks, tmp_path: Path) -> None:
    cell = correction.Cell(seed=0, folder=tmp_path, max_tokens=1, settings=SETTINGS)
    warm_start(cell.warm_config(), ranks=ranks)
    result = correction.run_cell(cell, ranks=ranks)
    first, last = result.points
    assert first.tokens == 0
    assert 16 * 10 < last.tokens <= 16 * 192
    assert f"| {last.tokens:,} |" in correction.table([result])


def test_what_the_expert_would_write_is_put_where_the_policy_acted(ranks: Ranks, tmp_path: Path) -> None:
    cell = correction.Cell(seed=0, folder=tmp_path, settings=SETTINGS)
    warm_start(cell.warm_config(), ranks=ranks)
    with asyncio.Runner() as runner:
        practised = practice(cell.config(), lag=0, ranks=ranks, runner=runner)
        one, *others = correction.corrected(practised, range(10_000, 10_003))
    assert [each.trajectory.task.index for each in others] == [10_001, 10_002]
    tokens, sequences = one.trajectory.token_array(), one.sequences()
    assert len(one.replies) == len(one.trajectory.turns) == len(sequences) > 1
    assert "search" in practised.setup.tokenizer.decode(one.replies[0])
    for turn, reply, sequence in zip(one.trajectory.turns, one.replies, sequences, strict=True):
        assert sequence.tokens.tolist() == [*tokens[: turn.start].tolist(), *reply]
        assert sequence.tokens[sequence.loss_mask].tolist() == reply
