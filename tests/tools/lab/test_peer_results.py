"""The bench of peers reads a run's metrics: when a success was reached, and what the run had used by then."""

from typing import Any

import pytest

from slipstream.tools.lab.peers.results import WINDOW, Point, Result, point_at, smoothed


def point(step: int, success: float) -> Point:
    return Point(step=step, success=success, seconds=step, episodes=100 * step, tokens=1000 * step)


def result(*successes: float) -> Result:
    points = [point(20 * index, success) for index, success in enumerate(successes)]
    return Result(arm="default", seed=0, points=points, trained_tokens=25_000, cpu_seconds=100.0)


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


def test_the_success_of_fresh_episodes_is_a_mean_over_the_episodes_of_the_last_steps() -> None:
    points = [point(step, 0.0 if step <= WINDOW else 1.0) for step in range(1, WINDOW + 3)]
    points[-1] = Point(step=WINDOW + 2, success=0.5, seconds=0, episodes=points[-2].episodes + 200, tokens=0)
    found = [each.success for each in smoothed(points)]
    assert found[:WINDOW] == [0.0] * WINDOW
    assert found[WINDOW:] == [pytest.approx(1 / 6), pytest.approx(200 / 700)]
    assert smoothed([point(1, 0.25)]) == [point(1, 0.25)]
