"""How many actors are advised, on hand-made steps."""

import pytest

from common.config import load_config
from common.config_error import ConfigError
from learner.advice import Reading, advised_actors


def steps(num: int, *, actors: int = 4, wait: float, used: float, queue: bool) -> list[Reading]:
    return [Reading(num_actors=actors, learner_wait=wait, slots_used=used, has_queue=queue)] * num


def advised(readings: list[Reading]) -> int:
    return advised_actors(readings, min_actors=1, max_actors=100)


@pytest.mark.parametrize(
    ("wait", "used", "queue", "wanted"),
    [
        (0.5, 1.0, True, 8),  # it waits for half of its time: twice as many
        (0.3, 1.0, True, 6),  # 4 / 0.7 = 5.7
        (0.95, 1.0, True, 8),  # at most twice as many at once
        (0.5, 0.4, False, 4),  # nothing is left to play: more would find nothing either
        (0.1, 0.3, False, 4),  # it waits a little: between the two bounds nothing changes
        (0.0, 1.0, True, 4),  # both are busy
        (0.0, 0.75, False, 4),  # nearly busy
        (0.0, 0.6, False, 3),  # 4 * 0.6 / 0.85 = 2.8
        (0.0, 0.1, False, 2),  # at most half at once
        (0.0, 1.5, True, 4),  # a lease may begin more than there are slots
    ],
)
def test_advice_follows_who_waits(wait: float, used: float, queue: bool, wanted: int) -> None:
    assert advised(steps(5, wait=wait, used=used, queue=queue)) == wanted


def test_what_was_advised_is_not_taken_back_once_it_was_done() -> None:
    """From 4 to 3: the episodes of 4 times 0.6 slots fill 0.8 of 3; from 4 to 8: half the waiting becomes none."""
    assert advised(steps(5, actors=3, wait=0.0, used=0.8, queue=False)) == 3
    assert advised(steps(5, actors=8, wait=0.0, used=1.0, queue=True)) == 8


def test_a_number_of_actors_is_judged_by_enough_steps_of_its_own() -> None:
    waiting = steps(4, wait=0.5, used=1.0, queue=True)
    assert advised(waiting) == 4
    assert advised(waiting + steps(1, wait=0.5, used=1.0, queue=True)) == 8
    assert advised(waiting + steps(4, actors=6, wait=0.5, used=1.0, queue=True)) == 6
    assert advised(steps(9, wait=0.5, used=1.0, queue=True) + steps(5, wait=0.0, used=1.0, queue=True)) == 4


def test_advice_keeps_to_its_bounds() -> None:
    waiting = steps(5, wait=0.5, used=1.0, queue=True)
    assert advised_actors(waiting, min_actors=1, max_actors=5) == 5
    assert advised_actors(waiting, min_actors=9, max_actors=12) == 9
    assert advised_actors([], min_actors=2, max_actors=5) == 2
    assert advised(steps(5, actors=0, wait=1.0, used=0.0, queue=True)) == 1
    assert advised(steps(5, actors=1, wait=0.0, used=0.0, queue=False)) == 1


def test_bounds_that_no_number_keeps_to_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`fleet.max_actors` must be >= fleet.min_actors = 8"):
        load_config(None, ["fleet.min_actors=8", "fleet.max_actors=4"])
