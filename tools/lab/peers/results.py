"""How much time and how many episodes each arm of the bench of peers needs to reach a held-out success.

The clock of a run starts with reinforcement learning, after the warm start.
"""

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import msgspec

from slipstream.common.process.run_dir import RunDir
from slipstream.learner.lead.tally import load_tally

SEEDS = (0, 1, 2)
SUCCESS = "eval/success_sampled"
WINDOW = 6  # steps over which the success of fresh episodes is a mean


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The success of the weights of a step, and what the run had used when it made them."""

    step: int
    success: float  # of sampled episodes on held-out tasks; of fresh ones (see `smoothed`) if none are held out
    seconds: float
    episodes: float  # training episodes that had finished
    tokens: float  # their prompt and sampled tokens


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    arm: str
    seed: int
    points: list[Point]
    trained_tokens: int  # prompt and sampled
    cpu_seconds: float  # of all processes of the run, with their start and the warm start

    @classmethod
    def of(cls, run_dir: RunDir, *, arm: str, seed: int, fresh: bool) -> Self:
        """The result of a run of ours; with `fresh`, a point for each step, of the episodes that ended before it."""
        records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        steps = [record for record in records if "perf/step_s" in record]
        if fresh:
            measured = {record["step"]: record.get("produced/success", 0.0) for record in steps}
        else:
            measured = {record["step"]: record[SUCCESS] for record in records if SUCCESS in record}
        points = [point_at(step, success, steps) for step, success in sorted(measured.items())]
        trained_tokens = load_tally(run_dir.tally).tokens_trained
        return cls(
            arm=arm,
            seed=seed,
            points=smoothed(points) if fresh else points,
            trained_tokens=trained_tokens,
            cpu_seconds=0.0,
        )

    def reached(self, goal: float) -> Point | None:
        """Where the line through the points first reaches `goal`; None if it never does."""
        for before, after in pairwise(self.points):
            if before.success < goal <= after.success:
                return between(before, after, (goal - before.success) / (after.success - before.success))
        return None


def point_at(step: int, success: float, records: Sequence[dict[str, Any]]) -> Point:
    """The point of a step, from the metrics of all steps. Step 0 is the start of reinforcement learning."""
    started = records[0]["time"] - records[0]["perf/step_s"]
    until = [record for record in records if record["step"] <= step]
    return Point(
        step=step,
        success=success,
        seconds=until[-1]["time"] - started if until else 0.0,
        episodes=sum(record["produced/episodes"] for record in until),
        tokens=sum(record["produced/episodes"] * record.get("replay/produced_tokens", 0.0) for record in until),
    )


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The points with the share of successes among all episodes of the last WINDOW steps."""
    counts = [
        point.episodes - before for point, before in zip(points, [0.0, *(p.episodes for p in points)], strict=False)
    ]
    wins = [point.success * count for point, count in zip(points, counts, strict=True)]
    windows = [slice(max(0, end - WINDOW), end) for end in range(1, len(points) + 1)]
    return [
        msgspec.structs.replace(point, success=sum(wins[window]) / max(1.0, sum(counts[window])))
        for point, window in zip(points, windows, strict=True)
    ]


def between(before: Point, after: Point, share: float) -> Point:
    """The point at `share` of the way from `before` to `after`."""
    mixed = {
        name: getattr(before, name) + share * (getattr(after, name) - getattr(before, name))
        for name in ("success", "seconds", "episodes", "tokens")
    }
    return Point(step=round(before.step + share * (after.step - before.step)), **mixed)


def spread_over_seeds(values: Sequence[float | None], form: str) -> str:
    """The mean of the values that are known, and each value, one per seed; of one seed it alone."""
    known = [value for value in values if value is not None]
    each = ", ".join("never" if value is None else form.format(value) for value in values)
    if len(values) == 1:
        return each
    return f"**{form.format(statistics.fmean(known))}** ({each})" if known else f"({each})"
