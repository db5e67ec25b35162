"""The study of searches: a short one by a scripted policy, and its numbers by hand."""

import asyncio
import random
from pathlib import Path

from slipstream.common.config.config import load_config
from slipstream.tools.lab.study import search
from slipstream.tools.lab.study.search_page import (
    CHAIN,
    Cell,
    OnTask,
    best_of,
    by_difficulty,
    line_of,
    solved_within,
    tables,
    unit_of,
)
from slipstream.tools.play.eval_attempt import Played
from tests.actors.episode.episodes import ids
from tests.common.text.small_tokenizer import END
from tests.guess import WORDS
from tests.tools.play.test_collect import TOKENIZER, settings, setup_of


def guessing(tokens: list[int], seed: int | None) -> list[int]:
    return ids(TOKENIZER, random.Random(seed).choice(WORDS) + END)


def test_all_arms_are_played_and_stand_in_the_tables(tmp_path: Path) -> None:
    config = settings("env.name=tests.guess:GuessEnv", "env.max_turns=5", "eval.num_tasks=6")
    cells = {}
    for seed in (0, 1):
        for arm in search.ARMS:
            stage = setup_of(config, guessing, tmp_path)
            tasks = asyncio.run(search.played(arm, stage, config, budget=24))
            assert len(tasks) == 6 and all(task.tokens for task in tasks)
            cells["guess", seed, arm] = Cell(env="guess", seed=seed, arm=arm, tasks=tasks)
    chain = cells["guess", 0, CHAIN]
    assert [len(task.episodes) for task in chain.tasks] == [search.POOL] * 6
    assert all(task.tokens == sum(each.num_written for each in task.episodes) for task in chain.tasks)
    for arm in ("dfsdt", "mcts", "revision"):
        for task in cells["guess", 0, arm].tasks:
            assert (task.solved_by is not None) == any(each.success for each in task.episodes)
            assert task.solved_by is None or task.solved_by <= task.tokens
    text = tables(cells)
    assert text.count("| mcts |") == 1 and text.count("| tree of thoughts, 3 x 2, likelihood |") == 1
    assert "| `guess`, solved within |" in text and "| best of 8, majority |" in text


def played(*, success: bool, tokens: int, end: str = "", mean_logprob: float = -1.0) -> Played:
    return Played(
        index=0,
        kind="",
        success=success,
        score=0.0,
        num_turns=1,
        num_invalid=0,
        num_tokens=tokens,
        num_written=tokens,
        mean_logprob=mean_logprob,
        end=end,
    )


def cell(arm: str, *episodes: Played, solved_by: int | None = None) -> Cell:
    tokens = sum(each.num_written for each in episodes)
    return Cell(env="e", seed=0, arm=arm, tasks=[OnTask(tokens=tokens, solved_by=solved_by, episodes=list(episodes))])


def test_independent_episodes_solve_a_task_from_any_place_of_their_circle() -> None:
    chain = cell(CHAIN, *(played(success=place == 2, tokens=10) for place in range(4)))
    assert unit_of(chain) == 10
    assert [solved_within(chain, most).tolist() for most in (9, 10, 25, 30, 40)] == [[0], [0.25], [0.5], [0.75], [1]]
    found = cell("mcts", played(success=True, tokens=50), solved_by=30)
    assert [solved_within(found, most).tolist() for most in (29, 30)] == [[0], [1]]


def test_a_choice_by_difficulty_stops_where_the_attempts_agree() -> None:
    agreeing = [played(success=True, tokens=10, end="a") for _ in range(8)]
    assert by_difficulty(cell(CHAIN, *agreeing)).tokens == 30  # three that agree are 94 % certain
    at_odds = [played(success=False, tokens=10, end=str(place)) for place in range(8)]
    assert by_difficulty(cell(CHAIN, *at_odds)).tokens == 80
    chain = cell(CHAIN, *at_odds[:4], *agreeing[:4])
    choice = best_of(chain, way="majority", size=4)
    assert (choice.success.tolist(), choice.tokens) == ([0.5], 40)


def test_best_of_n_between_two_sizes_is_on_the_line_through_them() -> None:
    episodes = [played(success=place % 2 == 0, tokens=10, mean_logprob=-float(place)) for place in range(8)]
    line = line_of(cell(CHAIN, *episodes), "likelihood")
    assert [line(tokens).tolist() for tokens in (5, 10, 15, 20, 900)] == [[0.5], [0.5], [0.75], [1], [1]]


def test_the_environments_of_the_study_can_be_configured() -> None:
    for name, changes in search.ENVS.items():
        assert load_config(search.TASK, [*search.SHARED, *changes]).env.name == name
