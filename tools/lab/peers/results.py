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
from slipstream.tools.lab.study.page import markdown

TASK = "conf/quickstart.yaml"
GOALS = (0.8, 0.88)
SHARED = ("eval.every=20", "eval.num_tasks=200")
SYNCHRONOUS = ("replay.target_lag=0", "replay.max_lag=0")
DROPPING = (  # the quickstart until 2026-11-27
    "sampling.temperature=1",
    "replay.drop_zero_variance=true",
    "learner.steps=200",
)
OURS: dict[str, tuple[str, ...]] = {  # the arms that are runs of ours, with their settings
    "default": (),
    "synchronous": SYNCHRONOUS,
    "dropping": DROPPING,
}
SEEDS = (0, 1, 2)
SUCCESS = "eval/success_sampled"


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An evaluation: the success of the weights of a step, and what the run had used when it made them."""

    step: int
    success: float  # of sampled episodes on held-out tasks
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
    def of(cls, run_dir: RunDir, *, arm: str, seed: int, cpu_seconds: float) -> Self:
        records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        steps = [record for record in records if "perf/step_s" in record]
        measured = {record["step"]: record[SUCCESS] for record in records if SUCCESS in record}  # step 0: the last one
        return cls(
            arm=arm,
            seed=seed,
            points=[point_at(step, success, steps) for step, success in sorted(measured.items())],
            trained_tokens=load_tally(run_dir.tally).tokens_trained,
            cpu_seconds=cpu_seconds,
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


def between(before: Point, after: Point, share: float) -> Point:
    """The point at `share` of the way from `before` to `after`."""
    mixed = {
        name: getattr(before, name) + share * (getattr(after, name) - getattr(before, name))
        for name in ("success", "seconds", "episodes", "tokens")
    }
    return Point(step=round(before.step + share * (after.step - before.step)), **mixed)


def table(results: Sequence[Result], arms: Sequence[str]) -> str:
    """In Markdown, what each arm needed: means over the seeds that reached the goal, with each seed in brackets."""
    rows = []
    for arm in arms:
        own = [result for result in results if result.arm == arm]
        if not own:
            continue
        cells = [arm]
        for goal in GOALS:
            found = [result.reached(goal) for result in own]
            cells.append(spread_over_seeds([point.seconds if point else None for point in found], "{:.0f} s"))
            cells.append(spread_over_seeds([point.episodes if point else None for point in found], "{:,.0f}"))
        cells.append(spread_over_seeds([result.points[-1].success for result in own], "{:.0%}"))
        cells.append(spread_over_seeds([result.trained_tokens / result.points[-1].tokens for result in own], "{:.2f}"))
        cells.append(
            spread_over_seeds([1000 * result.cpu_seconds / result.points[-1].episodes for result in own], "{:.0f} ms")
        )
        rows.append(cells)
    head = ["arm"]
    for goal in GOALS:
        head += [f"time to {goal:.0%}", f"episodes to {goal:.0%}"]
    return markdown([*head, "at the end", "trained ÷ finished tokens", "CPU an episode"], rows)


def spread_over_seeds(values: Sequence[float | None], form: str) -> str:
    """The mean of the values that are known, and each value, one per seed; None is `never`."""
    known = [value for value in values if value is not None]
    each = ", ".join("never" if value is None else form.format(value) for value in values)
    return f"**{form.format(statistics.fmean(known))}** ({each})" if known else f"({each})"
