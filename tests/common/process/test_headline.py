"""The numbers that people judge a run by: of the newest episodes, with how sure they are."""

from typing import Any

import pytest

from slipstream.common.process.headline import headline, held_out, progress_line, wilson

REST = {  # of what a view shows
    "lag/max": 2.0,
    "mismatch/kl": 0.001,
    "mismatch/effective_sample_size": 0.98,
    "fleet/num_actors": 2.0,
    "fleet/advised_actors": 3.0,
    "perf/step_s": 30.0,
}


def step(number: int, *, episodes: int, success: float, reward: float = 0.0) -> dict[str, Any]:
    """What the metrics file has of a step, as far as the terminal shows it."""
    produced = {"produced/success": success, "produced/reward": reward} if episodes else {}
    return {
        "step": number,
        "produced/episodes": episodes,
        **produced,
        "trained/success": 0.5,
        "trained/reward": 0.5,
        "lag/mean": 1.0,
        "replay/ready": 2.0,
        "fleet/generated_tokens_per_s": 30.0,
        "perf/trained_tokens_per_s": 20.0,
        "perf/learner_busy": 0.75,
    }


def test_a_headline_is_the_mean_over_the_newest_episodes_and_old_ones_are_forgotten() -> None:
    records = [
        step(1, episodes=225, success=0.0, reward=-1.0),
        step(2, episodes=25, success=0.5, reward=0.25),
        step(3, episodes=75, success=0.9, reward=0.75),
    ]
    newest = headline(records)
    assert newest is not None and newest.num_episodes == 100
    assert (newest.success, newest.reward) == (pytest.approx(0.8), pytest.approx(0.625))
    assert (newest.low, newest.high) == wilson(0.8, 100)


def test_what_ends_while_a_run_runs_out_does_not_count() -> None:
    """No group is opened any more: the episodes that end in the last steps are those that took longest."""
    records = [step(1, episodes=100, success=0.9), step(2, episodes=7, success=0.4)]
    assert headline(records, until=1) == headline(records[:1]) != headline(records)
    assert headline(records, until=0) == headline(records)  # a run of so few steps has nothing else


def test_records_without_an_episode_change_no_headline() -> None:
    records = [step(1, episodes=10, success=0.5), step(2, episodes=0, success=0.0), {"step": 2, "eval/num_tasks": 9.0}]
    assert headline(records) == headline(records[:1])
    assert headline(records[1:]) is None and headline([]) is None


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (0.0, 10), (0.1, 10), (0.5, 400), (0.9, 10), (1.0, 7)])
def test_the_interval_holds_every_probability_under_which_what_was_seen_is_no_surprise(rate: float, count: int) -> None:
    """Its ends solve (rate - p)^2 = z^2 p (1 - p) / n: what was seen is 1.96 standard deviations away from them."""
    for end in wilson(rate, count):
        assert (rate - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / count, abs=1e-12)
    low, high = wilson(rate, count)
    assert -1e-12 <= low <= rate <= high <= 1 + 1e-12
    assert wilson(-7.0, count) == wilson(0.0, count) and wilson(9.0, count) == wilson(1.0, count), "of damaged records"


def test_the_line_of_a_step_has_all_finished_episodes_and_what_is_trained_or_says_that_none_has_finished() -> None:
    line = progress_line([step(1, episodes=25, success=0.5), step(2, episodes=75, success=0.9, reward=0.75)])
    assert line.startswith("step    2  success 0.800 (0.71 to 0.87)  reward 0.562  trained success 0.500  lag 1.0  ")
    assert "no episode has finished" in progress_line([step(1, episodes=0, success=0.0)])


def test_a_held_out_rate_is_shown_with_its_interval() -> None:
    record = {"eval/success_sampled": 0.9, "eval/success_greedy": 1.0}
    assert held_out(record | {"eval/num_tasks": 10}) == "0.900 (0.60 to 0.98) sampled, 1.000 greedy"
    assert held_out(record) == "0.900 sampled, 1.000 greedy"
