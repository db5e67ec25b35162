"""A learner that waits for groups lets actors begin them at once; one that does not, by the newest weights."""

import pytest

from slipstream.learner.supply.haste import Haste


@pytest.mark.parametrize(
    ("waits", "hurries"),
    [
        ("", [True]),  # nothing is known yet
        ("..", [False, False]),
        ("x.", [True, True]),  # two steps without a wait are needed after the first wait
        ("x..", [True, True, False]),
        ("x..x...", [True, True, False, True, True, True, True]),  # then four
        ("x..x.......", [True, True, False, True, True, True, True, False, False, False, False]),
        ("x......", [True, True, False, False, False, False, False]),
    ],
)
def test_each_wait_doubles_the_steps_without_one_that_are_needed(waits: str, hurries: list[bool]) -> None:
    haste, found = Haste(), []
    for each in waits:
        haste.after_step(waited=each == "x")
        found.append(bool(haste))
    assert (found or [bool(haste)]) == hurries


def test_a_learner_whose_groups_come_late_by_the_newest_weights_waits_in_few_steps() -> None:
    """Each step without haste makes the next one wait."""
    haste, num_waits = Haste(), 0
    for _ in range(500):
        waits = not haste
        haste.after_step(waited=waits)
        num_waits += waits
    assert num_waits <= 60  # one in nine, once the number has grown to eight


def test_the_number_falls_again_once_the_learner_is_the_limit() -> None:
    haste = Haste()
    for waited in (*[True] * 9, *[False] * 200, True, False, False):
        haste.after_step(waited=waited)
    assert not haste
