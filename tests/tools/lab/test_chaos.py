"""Chaos: what is drawn is drawn again, what fails is made small, and a few schedules are played for real."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.tools.drill.schedule import (
    MAX_FAULTS,
    MIN_FAULTS,
    Outcome,
    Strike,
    draw,
    only,
    report,
    say_again,
    shrink,
)
from slipstream.tools.lab.soak.chaos import MAX_GAP_S, suffer
from slipstream.tools.lab.soak.chaos_faults import CATALOGUE
from slipstream.tools.lab.soak.stage import SoakStage


def strike(fault: str) -> Strike:
    return Strike(fault=fault, gap_s=0.2, seed=1)


def test_a_seed_is_a_schedule_and_many_of_them_hold_the_whole_catalogue() -> None:
    schedules = [draw(seed, CATALOGUE, max_gap_s=MAX_GAP_S) for seed in range(200)]
    assert schedules == [draw(seed, CATALOGUE, max_gap_s=MAX_GAP_S) for seed in range(200)]
    assert {strike.fault for strikes in schedules for strike in strikes} == set(CATALOGUE)
    assert all(MIN_FAULTS <= len(strikes) <= MAX_FAULTS for strikes in schedules)


def test_a_failure_is_made_as_small_as_it_still_fails() -> None:
    strikes = [strike(name) for name in "abcdef"]

    def fails(fewer: Sequence[Strike]) -> bool:
        return {"b", "e"} <= {one.fault for one in fewer}

    assert [one.fault for one in shrink(strikes, fails)] == ["b", "e"]


def test_what_fails_is_printed_as_the_smallest_command(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [strike(name) for name in "abcdef"]

    def play(fewer: Sequence[Strike]) -> Outcome:
        failures = ["lost"] if {"b", "e"} <= {one.fault for one in fewer} else []
        return Outcome(fired={}, failures=failures, recovered_s={})

    say_again("chaos --seed 3", drawn, drawn, play)
    assert capsys.readouterr().out == "  again: chaos --seed 3 --only 1 4\n"
    assert only(drawn, [1, 4]) == [strike("b"), strike("e")]
    assert only(drawn, []) == drawn


def test_a_report_counts_what_fired_and_how_long_it_took_to_recover(tmp_path: Path) -> None:
    outcomes = [
        Outcome(fired={"a": "", "b": ""}, failures=[], recovered_s={"a": 1.0, "b": 4.0}),
        Outcome(fired={"a": ""}, failures=["lost"], recovered_s={"a": 3.0}),
    ]
    facts = report(outcomes, "abc", tmp_path / "build" / "chaos.json")
    assert (facts["schedules"], facts["failed"], facts["failures"]) == (2, 1, ["lost"])
    assert (facts["fired"], facts["never_fired"]) == ({"a": 2, "b": 1}, ["c"])
    assert facts["recovered_s"] == {"median": 3.0, "worst": 4.0}
    assert facts["recovered_s_by_fault"] == {"a": {"median": 2.0, "worst": 3.0}, "b": {"median": 4.0, "worst": 4.0}}
    assert json.loads((tmp_path / "build" / "chaos.json").read_text()) == facts


@pytest.mark.long
@pytest.mark.timeout(300)
def test_live_processes_outlive_faults_of_each_kind(tmp_path: Path) -> None:
    faults = [
        "actor killed at an insert",
        "learner's replies lost",
        "server killed at a claim",
        "actor's link reset",
        "learner killed at a checkpoint",
        "garbage in the fleet",
        "an insert without a lease",
        "a second learner",
    ]
    outcome = suffer([strike(name) for name in faults], tmp_path, seed=1)
    assert outcome.failures == []
    assert list(outcome.fired) == faults and outcome.recovered_s[faults[-1]] > 0


@pytest.mark.timeout(300)
def test_books_that_are_cooked_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cook(stage: SoakStage, _: object) -> str:
        stage.client.hincrby("slipstream:{soak}:train:counters", "trained", 1)
        return "one more is trained than is"

    monkeypatch.setitem(CATALOGUE, "cooked", cook)
    outcome = suffer([strike("cooked")], tmp_path, seed=1)
    assert any("trained" in failure for failure in outcome.failures)
