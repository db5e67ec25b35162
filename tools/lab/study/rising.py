"""Tokens to a goal where no single evaluation decides.

`python -m slipstream.tools.lab.study.rising FILE [FILE ...] [--goal 0.88]`. A goal counts as reached at the first
evaluation that reaches it, so the more often a run is evaluated and the more it swings, the earlier it arrives by luck.
Here the evaluations of a run are pooled first, until none is below the one before it (isotonic regression, by pooling
adjacent violators). Both measures are printed for every arm of the files, and where the mean curve over the seeds,
pooled likewise, reaches the goal.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from slipstream.tools.lab.study.goodput import Point, Result, spread_over_seeds
from slipstream.tools.lab.study.page import markdown

STRIDE = 10_000  # tokens between two points of a mean curve


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing numbers with the least squared distance to `values`: 5, 7, 6, 9 become 5, 6.5, 6.5, 9."""
    pools = list[tuple[float, int]]()  # mean and size
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, size = (before * number + mean * size) / (number + size), number + size
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools]).tolist()


def pooled(result: Result) -> Result:
    """The same run, with the successes of its evaluations pooled."""
    successes = rising([point.success for point in result.points])
    points = [
        msgspec.structs.replace(point, success=success) for point, success in zip(result.points, successes, strict=True)
    ]
    return msgspec.structs.replace(result, points=points)


def results_of(path: Path) -> list[Result]:
    """The results in a file of `study-goodput` or `bench-peers`."""
    raw = json.loads(path.read_bytes())
    found = raw.get("results") or [cell["result"] for cell in raw["cells"]]
    unused = {"trained_tokens": 0, "cpu_seconds": 0.0}  # some runs were not asked for them
    return msgspec.convert([unused | each for each in found], list[Result])


def table(results: Sequence[Result], goal: float) -> str:
    """In Markdown, the tokens to `goal` of every arm by both measures, over its seeds."""
    arms = defaultdict(list)
    for result in sorted(results, key=lambda each: each.seed):
        arms[result.arm].append(result)
    rows = []
    for arm, own in arms.items():
        mean = mean_curve(own).reached(goal)
        of_mean = f"{mean.tokens:,.0f}" if mean else "never"
        rows.append([arm, _spread(own, goal), _spread([pooled(result) for result in own], goal), of_mean])
    return markdown(["arm", f"tokens to {goal:.0%}, first evaluation", "pooled evaluations", "mean curve"], rows)


def mean_curve(results: Sequence[Result]) -> Result:
    """The mean success of the runs after equal tokens, pooled, as far as all of them came."""
    last = min(result.points[-1].tokens for result in results)
    tokens = np.arange(0.0, last, STRIDE)
    successes = np.mean(
        [
            np.interp(tokens, [point.tokens for point in result.points], [point.success for point in result.points])
            for result in results
        ],
        axis=0,
    )
    points = [
        Point(step=0, success=success, seconds=0.0, episodes=0.0, tokens=after)
        for success, after in zip(successes.tolist(), tokens.tolist(), strict=True)
    ]
    return pooled(msgspec.structs.replace(results[0], points=points))


def _spread(results: Sequence[Result], goal: float) -> str:
    found = [result.reached(goal) for result in results]
    return spread_over_seeds([point.tokens if point else None for point in found], "{:,.0f}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="rising", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--goal", type=float, default=0.88)
    options = parser.parse_args(arguments)
    print(table([result for path in options.files for result in results_of(path)], options.goal))


if __name__ == "__main__":
    main(sys.argv[1:])
