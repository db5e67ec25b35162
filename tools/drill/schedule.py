"""Schedules of random faults: drawn from a seed, made as small as they fail, and reported. For chaos and for drills."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import msgspec

from slipstream.common.process.output import write_whole

MIN_FAULTS, MAX_FAULTS = 3, 6
TRIES = 2  # of a smaller schedule: processes race, so that it may fail now and then only


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a schedule."""

    fault: str
    gap_s: float  # since the strike before it
    seed: int  # of what the fault itself draws


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a schedule."""

    fired: dict[str, str]  # each fault, and what proves it
    failures: list[str]  # whatever is not as promised
    recovered_s: dict[str, float]  # from the end of a fault until an insert was answered and a step was made
    whole_s: float = 0.0  # from the end of all until every process had a part in that again, where that is looked at


def draw(seed: int, catalogue: Iterable[str], *, max_gap_s: float) -> list[Strike]:
    """The schedule of `seed`."""
    random = Random(seed)
    names = random.sample(list(catalogue), random.randint(MIN_FAULTS, MAX_FAULTS))
    return [
        Strike(fault=name, gap_s=round(random.uniform(0, max_gap_s), 3), seed=random.randrange(1 << 30))
        for name in names
    ]


def only(strikes: Sequence[Strike], numbers: Sequence[int]) -> list[Strike]:
    """The strikes with the numbers `only`; all of them without numbers."""
    return [strike for number, strike in enumerate(strikes) if not numbers or number in numbers]


def shrink(strikes: Sequence[Strike], fails: Callable[[Sequence[Strike]], bool]) -> list[Strike]:
    """The smallest part of `strikes` that still fails: each one that can be left out is left out."""
    smallest = list(strikes)
    for strike in strikes:
        fewer = [other for other in smallest if other is not strike]
        if fewer and fails(fewer):
            smallest = fewer
    return smallest


def say_again(
    command: str, drawn: Sequence[Strike], strikes: Sequence[Strike], play: Callable[[Sequence[Strike]], Outcome]
) -> None:
    """Shrink a failed schedule by playing parts of it, and print the `command` that plays the smallest."""
    smallest = shrink(strikes, lambda fewer: any(play(fewer).failures for _ in range(TRIES)))
    numbers = [str(number) for number, strike in enumerate(drawn) if strike in smallest]
    print(f"  again: {command} --only {' '.join(numbers)}", flush=True)


def report(outcomes: Sequence[Outcome], catalogue: Iterable[str], path: Path) -> dict[str, object]:
    """Write a report of `outcomes` to `path` as JSON, and return it."""
    fired = Counter(name for outcome in outcomes for name in outcome.fired)
    recovered: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, seconds in outcome.recovered_s.items():
            recovered.setdefault(name, []).append(seconds)
    facts: dict[str, object] = {
        "schedules": len(outcomes),
        "failed": sum(bool(outcome.failures) for outcome in outcomes),
        "failures": [failure for outcome in outcomes for failure in outcome.failures],
        "fired": dict(sorted(fired.items())),
        "proofs": {name: proof for outcome in outcomes for name, proof in outcome.fired.items()},  # the last of each
        "never_fired": sorted(set(catalogue) - set(fired)),
        "recovered_s": summary([seconds for many in recovered.values() for seconds in many]),
        "whole_s": summary([outcome.whole_s for outcome in outcomes if outcome.whole_s]),
        "recovered_s_by_fault": {name: summary(many) for name, many in sorted(recovered.items())},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(facts, indent=1) + "\n")
    return facts


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the largest value; empty without values."""
    return {"median": round(statistics.median(seconds), 3), "worst": max(seconds)} if seconds else {}
