"""The curves of a report, drawn as SVG: what a metric of one or several runs was from step to step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.common.process.headline import wilson
from slipstream.common.process.printable import printable
from slipstream.tools.see.metrics_window import NUM_STEPS, Record
from slipstream.tools.see.run_files import RunFiles

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 500, 240, 50, 10, 10, 56
COLOURS = ("#1b6ca8", "#c0392b", "#d68910", "#1e8449", "#7d3c98", "#566573", "#17a2a2", "#b03a78", "#8d6e2f", "#9aa5b1")
NUM_TICKS = 5
MAX_BINS = 30  # of steps, each of which is one point of a curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A value at a step, and its 95 % interval."""

    step: float
    value: float
    low: float
    high: float


# By section of the report: captions with the unit, and the metrics with the names of their curves.
FIGURES: dict[str, dict[str, dict[str, str]]] = {
    "Is it learning?": {
        "Success of all finished episodes, and of held-out tasks, with 95 % intervals": {
            "produced/success": "all episodes",
            "eval/success_sampled": "held-out, sampled",
            "eval/success_greedy": "held-out, greedy",
        },
        "Mean return of all finished episodes": {"produced/reward": "all episodes"},
    },
    "How stale is the data?": {
        "Lag: optimizer steps from sampling to training": {
            "lag/mean": "oldest token",
            "lag/max": "largest",
            "lag/newest_mean": "newest token",
        },
        "Effective sample size: the share of the tokens that still tells about the current policy": {
            "mismatch/effective_sample_size": "of tokens",
        },
    },
    "Where does the time go?": {
        "Tokens a second: sampled by the actors, and trained on, prompts included": {
            "fleet/generated_tokens_per_s": "generated",
            "perf/trained_tokens_per_s": "trained",
        },
    },
    "Where are the trajectories, and what do they cost?": {
        "Goodput: the share of the tokens that are trained and not dropped": {"perf/goodput": "goodput"},
        "Cost of the actors so far, in dollars": {"fleet/cost_dollars": "dollars"},
    },
}


def figures(runs: Sequence[RunFiles], section: str) -> str:
    """The figures of a section as HTML, without those that no run has recorded; two curves of each of several runs."""
    drawn = []
    for caption, names in FIGURES.get(section, {}).items():
        curves = {}
        for run in runs:
            for metric, name in list(names.items())[: 3 if len(runs) == 1 else 2]:
                if points := _held_out(run, metric) if metric.startswith("eval/") else _means(run.steps, metric):
                    curves[name if len(runs) == 1 else f"{run.name}: {name}"] = points
        if curves:
            drawn.append(f"<figure><figcaption>{escaped(caption)}</figcaption>{draw(curves)}</figure>")
    return f'<div class="figures">{"".join(drawn)}</div>\n' if drawn else ""


def draw(curves: Mapping[str, Sequence[Point]]) -> str:
    """The SVG of curves by name, upwards from 0, or from the lowest value if that is negative."""
    points = [point for curve in curves.values() for point in curve]
    x, across = _axis([point.step for point in points], LEFT, WIDTH - RIGHT)
    y, upwards = _axis([0.0, *(end for point in points for end in (point.low, point.high))], HEIGHT - BOTTOM, TOP)
    parts = [_text(x(tick), HEIGHT - BOTTOM + 16, number(tick), "middle") for tick in across]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 32, "optimizer steps", "middle"))
    for tick in upwards:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-opacity=".25"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, number(tick), "end"))
    for place, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(_text(LEFT, HEIGHT + 16 * place, name, colour=colour))
        path = " ".join(f"{x(point.step):.1f},{y(point.value):.1f}" for point in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point in curve:
            at, shown = f"{x(point.step):.1f}", f"{name}, step {point.step:.0f}: {number(point.value)}"
            if point.low < point.high:
                parts.append(f'<path d="M{at} {y(point.low):.1f}V{y(point.high):.1f}" stroke="{colour}"/>')
                shown += f" ({number(point.low)} to {number(point.high)})"
            dot = f'<circle cx="{at}" cy="{y(point.value):.1f}" r="3" fill="{colour}">'
            parts.append(f"{dot}<title>{escaped(shown)}</title></circle>")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + 16 * len(curves)}" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>"])


def escaped(text: str) -> str:
    """`text` of other processes as HTML, without invisible characters."""
    return escape(printable(text))


def number(value: float) -> str:
    """`value` in a few characters, as 1.2k or 0.05."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _axis(values: Sequence[float], start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """Maps the range of `values` onto the pixels from `start` to `stop`; with about NUM_TICKS round numbers in it."""
    low, high = min(values), max(values)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        high = low + max(1.0, abs(low))
    raw = (high - low) / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    apart = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    ticks = range(math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9) + 1)
    return lambda value: start + (value - low) / (high - low) * (stop - start), [tick * apart for tick in ticks]


def _text(x: float, y: float, text: str, anchor: str = "start", *, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escaped(text)}</text>'


def _held_out(run: RunFiles, metric: str) -> list[Point]:
    return [
        _fraction(record["step"], record[metric], record["eval/num_tasks"])
        for record in run.evaluations
        if metric in record
    ]


def _means(steps: Sequence[Record], metric: str) -> list[Point]:
    """The means of `metric` over bins of steps; of a metric of finished episodes, weighted by their number."""
    name, usual = ("produced/episodes", 0.0) if metric.startswith("produced/") else (NUM_STEPS, 1)
    weighed = [(record, record.get(name, usual)) for record in steps if metric in record]
    having = [(record, weight) for record, weight in weighed if weight >= 1]
    size, points = max(1, -(-len(having) // MAX_BINS)), []
    for records in (having[start : start + size] for start in range(0, len(having), size)):
        step, total = records[-1][0]["step"], sum(weight for _, weight in records)
        mean = sum(record[metric] * weight for record, weight in records) / total
        is_success = metric == "produced/success"
        points.append(_fraction(step, mean, total) if is_success else Point(step=step, value=mean, low=mean, high=mean))
    return points


def _fraction(step: float, share: float, count: float) -> Point:
    low, high = wilson(share, round(count))
    return Point(step=step, value=share, low=low, high=high)
