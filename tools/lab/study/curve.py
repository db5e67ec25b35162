"""Draw the learning curve of a run, as SVG: `python -m slipstream.tools.lab.study.curve RUN_FOLDER FILE.svg`."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.common.process.output import write_whole
from slipstream.tools.lab.study.plot import Line, Point, svg

NUM_BINS = 10


def main(arguments: Sequence[str]) -> int:
    """Read `metrics.jsonl` and `summary.json` of the run's folder and write the chart."""
    folder, target = map(Path, arguments)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    write_whole(target, curve(records, summary["eval"]))
    return 0


def curve(records: Sequence[dict[str, Any]], evaluations: dict[str, dict[str, Any]]) -> str:
    """The chart: success of all finished episodes, in bins of steps, and held-out success before and after RL."""
    finished = [record for record in records if record.get("produced/episodes")]
    last_step = max(record["step"] for record in finished)
    before, after = list(evaluations.values())[-2:]
    columns = ["0", *(str(round(last_step * (index + 1) / NUM_BINS)) for index in range(NUM_BINS))]
    lines = [Line(name="all episodes", points=_binned(finished, last_step=last_step))]
    for how in ("sampled", "greedy"):
        points = [
            _point(column, result[how], result["num_tasks"]) for column, result in ((0, before), (NUM_BINS, after))
        ]
        lines.append(Line(name=f"held-out, {how}", points=points))
    return svg(lines, columns=columns, across="optimizer steps", upwards="success (whiskers: 95 % interval)")


def _binned(records: Sequence[dict[str, Any]], *, last_step: int) -> list[Point]:
    points = []
    for index in range(NUM_BINS):
        first, last = last_step * index / NUM_BINS, last_step * (index + 1) / NUM_BINS
        inside = [record for record in records if first < record["step"] <= last]
        num_episodes = sum(record["produced/episodes"] for record in inside)
        if num_episodes:
            num_solved = sum(record["produced/success"] * record["produced/episodes"] for record in inside)
            points.append(_point(index + 1, num_solved / num_episodes, num_episodes))
    return points


def _point(column: int, success: float, num_episodes: float) -> Point:
    """With half the width of the normal 95 % interval."""
    deviation = 1.96 * math.sqrt(success * (1 - success) / num_episodes)
    return Point(column=column, value=success, deviation=deviation)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
