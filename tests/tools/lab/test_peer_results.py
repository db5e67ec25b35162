"""The bench of peers reads a run's metrics: when a success was reached, and what the run had used by then."""

from typing import Any

import pytest

from slipstream.tools.lab.peers.results import Point, Result, point_at, table


def point(step: int, success: float) -> Point:
    return Point(step=step, success=success, seconds=step, episodes=100 * step, tokens=1000 * step)


def result(*successes: float, seed: int = 0) -> Result:
    points = [point(20 * index, success) for index, success in enumerate(successes)]
    return Result(arm="default", seed=seed, points=points, trained_tokens=25_000, cpu_seconds=100.0)


def test_a_point_counts_what_had_finished_up_to_its_step_from_the_start_of_reinforcement_learning() -> None:
    def record(step: int, time: float, episodes: int) -> dict[str, Any]:
        return {
            "step": step,
            "time": time,
            "perf/step_s": 2.0,
            "produced/episodes": episodes,
            "replay/produced_tokens": 50,
        }

    records = [record(1, 102.0, 30), record(2, 105.0, 10), record(3, 109.0, 60)]
    assert point_at(0, 0.4, records) == Point(step=0, success=0.4, seconds=0, episodes=0, tokens=0)
    assert point_at(2, 0.5, records) == Point(step=2, success=0.5, seconds=5, episodes=40, tokens=2000)


def test_a_goal_is_reached_where_the_line_through_the_points_first_crosses_it() -> None:
    found = result(0.4, 0.7, 0.9, 0.6, 0.9).reached(0.8)
    assert found is not None
    assert (found.step, found.seconds, found.episodes) == (30, pytest.approx(30), pytest.approx(3000))
    assert result(0.4, 0.7).reached(0.8) is None


def test_the_table_names_the_seeds_that_never_reached_a_goal() -> None:
    text = table([result(0.4, 0.84), result(0.4, 0.6, seed=1)], ["default", "other"])
    assert "| default | **18 s** (18 s, never) | **1,818** (1,818, never) | (never, never) |" in text
    assert "**72%** (84%, 60%)" in text and "**1.25**" in text and "**50 ms**" in text and "other" not in text
