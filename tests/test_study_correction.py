"""The study of credit: what an expert says of a turn, and what is trained on it."""

import asyncio
from pathlib import Path

import pytest

from common.trajectory import Task
from envhub.catalogue import make_env
from learner.ranks import Ranks
from tools.study import credit
from tools.study.run import practice, warm_start

SETTINGS = (
    *("warm_start.episodes=4", "eval.num_tasks=4", "replay.group_size=2", "replay.groups_per_step=32"),
    *("model.tiny.hidden_size=32", "model.tiny.num_layers=1", "model.tiny.num_heads=1", "model.tiny.num_kv_heads=1"),
)


def test_a_state_is_worth_the_chance_that_each_step_of_the_expert_is_made() -> None:
    assert credit.values_of([2, 1, None], success=False, on_track=0.9) == pytest.approx([0.81, 0.9, 0, 0])
    assert credit.values_of([1], success=True, on_track=0.5) == [0.5, 1.0]


def test_a_turn_keeps_on_track_if_the_expert_then_needs_a_step_less() -> None:
    assert credit.kept_on_track([2, 1, 1, None], success=False) == [True, False, False]
    assert credit.kept_on_track([2, 1], success=True) == [True, True]
    assert credit.kept_on_track([None, None], success=False) == []


def test_values_explain_the_outcomes_or_do_not() -> None:
    assert credit.explained_variance([0, 1, 1], [0, 1, 1]) == 1
    assert credit.explained_variance([0.5, 0.5], [0, 1]) == 0
    assert credit.explained_variance([0.25, 0.75], [0, 1]) == pytest.approx(0.75)
    assert credit.explained_variance([0.3], [1]) == 0


def test_the_steps_of_the_expert_are_counted_and_the_state_stays() -> None:
    async def counted() -> tuple[list[int | None], int, str, str]:
        env = make_env("shop", {"profile": "small"})
        await env.reset(Task(env="shop", split="train", index=3))
        before = env.state_key()
        steps = await credit.steps_of_expert(env, at_most=8)
        assert steps is not None
        found = [steps, await credit.steps_of_expert(env, at_most=steps - 1)]
        after, taken = env.state_key(), 0
        while not (await env.step(env.expert())).success:
            taken += 1
        return found, taken + 1, before, after

    found, taken, before, after = asyncio.run(counted())
    assert found == [taken, None]
    assert taken > 1
    assert before == after


@pytest.mark.parametrize("arm", ["credit", "correction"])
def test_a_short_study_learns_from_each_arm(arm: str, ranks: Ranks, tmp_path: Path) -> None:
    cell = credit.Cell(arm=arm, seed=0, folder=tmp_path, max_tokens=1, settings=SETTINGS)
    warm_start(cell.warm_config(), ranks=ranks)
    result = credit.run_cell(cell, ranks=ranks)
    assert [point.tokens > 0 for point in result.points] == [False, True]
    assert "| 100,000 |" in credit.table([result])


def test_what_the_expert_would_write_is_put_where_the_policy_acted(ranks: Ranks, tmp_path: Path) -> None:
    cell = credit.Cell(arm="correction", seed=0, folder=tmp_path, settings=SETTINGS)
    warm_start(cell.warm_config(), ranks=ranks)
    with asyncio.Runner() as runner:
        practised = practice(cell.config(), lag=0, ranks=ranks, runner=runner)
        (trajectory, noted), *others = credit.asked(practised, range(10_000, 10_003))
    assert [each.task.index for each, _ in others] == [10_001, 10_002]
    assert len(noted.steps_left) == len(noted.replies) == len(trajectory.turns)
    assert "search" in practised.setup.tokenizer.decode(noted.replies[0])
    first, tokens = credit.corrected(trajectory, noted)[0], trajectory.token_array()
    begun = trajectory.turns[0].start
    assert first.tokens[:begun].tolist() == tokens[:begun].tolist()
    assert first.tokens[begun:].tolist() == noted.replies[0]
    assert first.tokens[first.loss_mask].tolist() == noted.replies[0]
    advantages = credit.advantages_of(trajectory, range(1, 1 + len(trajectory.turns)))
    assert (advantages > 0).tolist() == trajectory.loss_mask_array().tolist()
    assert advantages[trajectory.turns[-1].start] == len(trajectory.turns)
