"""Draws a small line chart as SVG text: fractions over a few columns, with error bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipstream.tools.see.curves import COLOURS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 60, 150, 30, 50
APART = 5  # pixels between the whiskers of one column's lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A mean and its standard deviation."""

    column: int
    value: float  # in [0, 1]
    deviation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A named series of points, drawn in one colour."""

    name: str
    points: Sequence[Point]


def svg(lines: Sequence[Line], *, columns: Sequence[str], across: str, upwards: str) -> str:
    """Return the chart on white, with named axes and a legend at the right. It has at most ten lines."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 12, upwards),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across, anchor="middle"),
    ]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth * 10} %", anchor="end"))
    for column, name in enumerate(columns):
        parts.append(_text(_x(column, len(columns)), HEIGHT - BOTTOM + 18, name, anchor="middle"))
    for index, (line, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        shift = APART * (index - (len(lines) - 1) / 2)
        parts += _line(line, colour, num_columns=len(columns), shift=shift)
        y = TOP + 10 + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 15} {y}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 39, y + 4, line.name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(line: Line, colour: str, *, num_columns: int, shift: float) -> list[str]:
    at = [(_x(point.column, num_columns) + shift, point) for point in line.points]
    path = " ".join(f"{x:.1f},{_y(point.value):.1f}" for x, point in at)
    whiskers = "".join(
        f"M{x:.1f} {_y(point.value - point.deviation):.1f}V{_y(point.value + point.deviation):.1f}" for x, point in at
    )
    dots = [f'<circle cx="{x:.1f}" cy="{_y(point.value):.1f}" r="3" fill="{colour}"/>' for x, point in at]
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<path d="{whiskers}" stroke="{colour}"/>',
        *dots,
    ]


def _x(column: int, num_columns: int) -> float:
    return LEFT + (column + 0.5) * (WIDTH - LEFT - RIGHT) / num_columns


def _y(value: float) -> float:
    return TOP + (1 - min(max(value, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
