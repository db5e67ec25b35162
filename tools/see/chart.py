"""Draws charts as SVG text: lines over numbers with intervals, layers that add up, and bars of shares."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.common.process.printable import printable

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 60, 190, 30, 46
COLOURS = ("#1b6ca8", "#c0392b", "#d68910", "#1e8449", "#7d3c98", "#566573", "#17a2a2", "#b03a78", "#8d6e2f", "#9aa5b1")
NUM_TICKS = 5
BAR_HEIGHT = 26
APART = 5  # pixels between the marks of two lines
MAX_NAME = 26  # characters of a legend's entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A value at `x`, and the interval that it may lie in."""

    x: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A named series of points in the order of x. Their intervals are drawn as a band, or of marks as whiskers."""

    name: str
    points: Sequence[Point]
    is_limit: bool = False  # drawn dashed and grey
    is_marks: bool = False  # points that are far apart, drawn as dots


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A named part of a sum, with a value for each x."""

    name: str
    values: Sequence[float]


def plain(pairs: Iterable[tuple[float, float]]) -> list[Point]:
    """Points without an interval."""
    return [Point(x=x, value=value, low=value, high=value) for x, value in pairs]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Maps numbers from `low` to `high` onto pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """About NUM_TICKS round numbers in the range."""
        raw = (self.high - self.low) / NUM_TICKS
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def line_chart(lines: Sequence[Line], *, across: str, upwards: str, highest: float | None = None) -> str:
    """The chart of `lines`, each with at least one point; upwards from 0, or from the lowest value if it is negative.

    `highest` is the upper end of the vertical axis; None for the largest value.
    """
    points = [point for line in lines for point in line.points]
    x = _scale([point.x for point in points], LEFT, WIDTH - RIGHT)
    heights = [0.0, *(point.low for point in points), *(point.high for point in points)]
    y = _scale([*heights, highest or 0.0], HEIGHT - BOTTOM, TOP)
    parts, colours = [*_axes(x, y, across, upwards)], iter(COLOURS * (1 + len(lines) // len(COLOURS)))
    for row, line in enumerate(lines):
        colour = "#888" if line.is_limit else next(colours)
        parts += _marks(line, colour, x, y, shift=APART * row) if line.is_marks else _line(line, colour, x, y)
        parts += _legend(row, line.name, colour, is_limit=line.is_limit)
    return _svg(parts, HEIGHT, upwards)


def layer_chart(layers: Sequence[Layer], xs: Sequence[float], *, across: str, upwards: str) -> str:
    """The chart of `layers`, each on top of those before it."""
    x = _scale(xs, LEFT, WIDTH - RIGHT)
    sums = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    y = _scale([0.0, *sums], HEIGHT - BOTTOM, TOP)
    parts, below = list[str](), [0.0] * len(xs)
    for layer, colour in zip(layers, COLOURS, strict=False):
        above = [bottom + value for bottom, value in zip(below, layer.values, strict=True)]
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        parts.append(f'<polygon points="{_path(outline, x, y)}" fill="{colour}"/>')
        below = above
    for row, index in enumerate(reversed(range(len(layers)))):
        parts += _legend(row, layers[index].name, COLOURS[index % len(COLOURS)])
    return _svg([*parts, *_axes(x, y, across, upwards)], HEIGHT, upwards)


def share_bars(bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One bar for each (name, parts), divided by the parts' shares of their sum, which must be above 0."""
    names = list(dict.fromkeys(part for _, parts in bars for part, value in parts if value))
    colour_of = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    height = max(len(bars) * (BAR_HEIGHT + 24), 20 * len(names)) + TOP
    drawn = list[str]()
    for row, (title, parts) in enumerate(bars):
        top, at = TOP + row * (BAR_HEIGHT + 24), float(LEFT)
        drawn.append(_text(LEFT, top - 6, title))
        whole = sum(value for _, value in parts)
        for name, value in ((name, value) for name, value in parts if value):
            width = value / whole * (WIDTH - RIGHT - LEFT)
            drawn.append(
                f'<rect x="{at:.1f}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour_of[name]}"/>'
            )
            if width > 40:
                drawn.append(
                    _text(
                        at + width / 2, top + BAR_HEIGHT / 2 + 4, f"{value / whole:.0%}", anchor="middle", colour="#fff"
                    )
                )
            at += width
    for row, name in enumerate(names):
        drawn += _legend(row, name, colour_of[name])
    return _svg(drawn, height, "; ".join(title for title, _ in bars))


def number(value: float) -> str:
    """`value` in a few characters, as 1.2k or 0.05."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _scale(values: Sequence[float], start: float, stop: float) -> _Scale:
    low, high = min(values), max(values)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        high = low + max(1.0, abs(low))
    return _Scale(low=low, high=high, start=start, stop=stop)


def _axes(x: _Scale, y: _Scale, across: str, upwards: str) -> list[str]:
    parts = [_text(LEFT, TOP - 12, upwards), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, across, anchor="middle")]
    for tick in y.ticks():
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-opacity=".25"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, number(tick), anchor="end"))
    parts += [_text(x(tick), HEIGHT - BOTTOM + 18, number(tick), anchor="middle") for tick in x.ticks()]
    return parts


def _line(line: Line, colour: str, x: _Scale, y: _Scale) -> list[str]:
    points, parts = line.points, list[str]()
    if any(point.low < point.high for point in points):
        outline = [*((point.x, point.high) for point in points), *((point.x, point.low) for point in reversed(points))]
        parts.append(f'<polygon points="{_path(outline, x, y)}" fill="{colour}" fill-opacity=".15"/>')
    path = _path([(point.x, point.value) for point in points], x, y)
    dash = ' stroke-dasharray="6 4"' if line.is_limit else ""
    if len(points) == 1:
        parts.append(f'<circle cx="{x(points[0].x):.1f}" cy="{y(points[0].value):.1f}" r="3" fill="{colour}"/>')
    parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    return parts


def _marks(line: Line, colour: str, x: _Scale, y: _Scale, *, shift: float) -> list[str]:
    """Dots with whiskers, moved inwards by `shift` pixels, so that those of two lines at one place are both seen."""
    parts = list[str]()
    for point in line.points:
        at = x(point.x)
        at += shift if at < (LEFT + WIDTH - RIGHT) / 2 else -shift
        parts.append(f'<path d="M{at:.1f} {y(point.low):.1f}V{y(point.high):.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{y(point.value):.1f}" r="4" fill="{colour}"/>')
    return parts


def _path(points: Iterable[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(across):.1f},{y(upwards):.1f}" for across, upwards in points)


def _legend(row: int, name: str, colour: str, *, is_limit: bool = False) -> list[str]:
    at = TOP + 8 + 20 * row
    dash = ' stroke-dasharray="6 4"' if is_limit else ""
    short = name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
    return [
        f'<path d="M{WIDTH - RIGHT + 12} {at}h18" stroke="{colour}" stroke-width="{2 if is_limit else 4}"{dash}/>',
        _text(WIDTH - RIGHT + 36, at + 4, short),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(printable(text))}</text>'


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{escape(printable(title))}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
