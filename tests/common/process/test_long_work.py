"""Long work reports how far it has come; short work reports nothing."""

import time

import pytest

from slipstream.common.process.long_work import LongWork


def test_it_reports_every_ten_seconds_how_far_it_is_and_before_that_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, now = list[str](), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    work = LongWork("episodes", 40, report=reported.append)
    for number in range(1, 41):
        now += 1.0
        work.at(number, more="loss 0.5")
    assert reported == [
        "episodes: 10 of 40, about 30 s more; loss 0.5",
        "episodes: 20 of 40, about 20 s more; loss 0.5",
        "episodes: 30 of 40, about 10 s more; loss 0.5",
        "episodes: 40 of 40; loss 0.5",
    ]
    reported.clear()
    now = 0.0
    work = LongWork("episodes", 3, report=reported.append)
    for number in range(1, 4):
        now = 3.0 * number
        work.done()
    assert reported == [], "work that takes seconds"
    now = 20.0
    work.at(0)
    assert reported == ["episodes: 0 of 3"]
