"""How many actors are advised, on hand-made steps."""

import pytest

from slipstream.learner.lead.advice import StepLoad, advised_actors


def steps(num: int, *, actors: int = 4, wait: float, used: float, queue: bool) -> list[StepLoad]:
    return [StepLoad(num_actors=actors, learner_wait=wait, slots_used=used, has_queue=queue)] * num


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
    ],
)
def test_advice_follows_who_waits(wait: float, used: float, queue: bool, wanted: int) -> None:
    assert advised_actors(steps(5, wait=wait, used=used, queue=queue)) == wanted


def test_what_was_advised_is_not_taken_back_once_it_was_done() -> None:
    """From 4 to 3: the episodes of 4 times 0.6 slots fill 0.8 of 3; from 4 to 8: half the waiting becomes none."""
    assert advised_actors(steps(5, actors=3, wait=0.0, used=0.8, queue=False)) == 3
    assert advised_actors(steps(5, actors=8, wait=0.0, used=1.0, queue=True)) == 8


def test_advice_needs_enough_steps_with_the_same_number_of_actors() -> None:
    waiting = steps(4, wait=0.5, used=1.0, queue=True)
    assert advised_actors(waiting) == 4
    assert advised_actors(waiting + steps(1, wait=0.5, used=1.0, queue=True)) == 8
    assert advised_actors(waiting + steps(4, actors=6, wait=0.5, used=1.0, queue=True)) == 6
    assert advised_actors(steps(9, wait=0.5, used=1.0, queue=True) + steps(5, wait=0.0, used=1.0, queue=True)) == 4


def test_an_actor_that_was_lost_does_not_lower_the_advice() -> None:
    """Eight actors, advised because four let the learner wait; one is lost and replaced, again and again."""
    grown = steps(5, wait=0.5, used=1.0, queue=True) + steps(3, actors=8, wait=0.0, used=1.0, queue=True)
    assert advised_actors(grown + steps(2, actors=7, wait=0.1, used=1.0, queue=True)) == 8
    busy = steps(5, actors=8, wait=0.1, used=1.0, queue=True)
    flickering = [*busy, *(steps(2, actors=7, wait=0.1, used=1.0, queue=True) + busy[:3]) * 3]
    assert advised_actors(flickering) == 8
    assert advised_actors(busy + steps(5, actors=7, wait=0.1, used=1.0, queue=True)) == 7  # seven are enough


def test_advice_is_at_least_one_actor() -> None:
    assert advised_actors([]) == 1
    assert advised_actors(steps(5, actors=0, wait=1.0, used=0.0, queue=True)) == 1
    assert advised_actors(steps(5, actors=1, wait=0.0, used=0.0, queue=False)) == 1
