"""Draws bar charts and line charts as SVG, from values alone. The same values give the same file.

There are no fonts, scripts or links to fetch. The background is white, so a dark page shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.results import number

WIDTH = 720
LEFT, RIGHT, TOP = 220, 90, 46
BAR, GAP, GROUP_GAP = 16, 3, 14
PLOT_HEIGHT = 260
COLORS = ("#1f6feb", "#8b949e", "#d4a72c", "#2da44e", "#bf3989")
"""For the first series, the second, and so on: each has enough contrast with white."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, with the ends of a line for the range of its rounds."""

    value: float
    low: float
    high: float


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, Bar]]) -> str:
    """Return horizontal bars: by group, such as a quantity, and series, such as a contestant."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    largest = max((bar.high for group in groups.values() for bar in group.values()), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / (largest or 1.0)
    parts: list[str] = []
    y = TOP + 24
    for group, members in groups.items():
        height = len(members) * (BAR + GAP)
        parts.append(_text(LEFT - 8, y + height / 2, group, anchor="end"))
        for name, bar in members.items():
            color = COLORS[series.index(name) % len(COLORS)]
            parts.append(
                f'<rect x="{LEFT}" y="{_n(y)}" width="{_n(bar.value * scale)}" height="{BAR}" '
                f'fill="{color}"/>'
            )
            if bar.high > bar.low:
                middle = y + BAR / 2
                low, high = (LEFT + value * scale for value in (bar.low, bar.high))
                parts.append(_line([(low, middle), (high, middle)], "#24292f"))
            x = LEFT + max(bar.value, bar.high) * scale + 6
            parts.append(_text(x, y + BAR / 2, f"{number(bar.value)} {unit}".strip()))
            y += BAR + GAP
        y += GROUP_GAP
    return _document(title, [*_legend(series), *parts], y)


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = False,
) -> str:
    """Return a line for each series. ``logarithmic`` is for the horizontal axis."""
    points = [point for line in series.values() for point in line]
    xs = [math.log10(x) if logarithmic else x for x, _ in points]
    left, right = (min(xs), max(xs)) if logarithmic else (0.0, _round_up(max(xs)))
    top = _round_up(max(y for _, y in points))
    x_scale = (WIDTH - LEFT / 2 - RIGHT) / ((right - left) or 1.0)
    bottom = TOP + 24 + PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log10(x) if logarithmic else x) - left
        return LEFT / 2 + along * x_scale, bottom - y / top * PLOT_HEIGHT

    parts = []
    for step in range(5):
        value = top * step / 4
        y = bottom - PLOT_HEIGHT * step / 4
        parts.append(_line([(LEFT / 2, y), (WIDTH - RIGHT, y)], "#d0d7de"))
        parts.append(_text(LEFT / 2 - 8, y, number(value), anchor="end"))
    parts += [
        _text(place(x, 0)[0], bottom + 16, number(x), anchor="middle")
        for x in _x_ticks(points, left, right, logarithmic=logarithmic)
    ]
    for index, line in enumerate(series.values()):
        parts.append(_line([place(x, y) for x, y in line], COLORS[index % len(COLORS)], width=2))
    parts.append(_text((LEFT / 2 + WIDTH - RIGHT) / 2, bottom + 36, x_label, anchor="middle"))
    parts.append(_text(12, TOP + 8, y_label))
    return _document(title, [*_legend(list(series)), *parts], bottom + 50)


def _x_ticks(
    points: Sequence[tuple[float, float]], left: float, right: float, *, logarithmic: bool
) -> list[float]:
    if logarithmic:
        return sorted({x for x, _ in points})
    return [left + (right - left) * step / 4 for step in range(5)]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 2.5, 5 and 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.9999)


def _legend(series: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    if len(series) < 2:
        return
    for index, name in enumerate(series):
        color = COLORS[index % len(COLORS)]
        yield f'<rect x="{_n(x)}" y="{TOP - 10}" width="12" height="12" fill="{color}"/>'
        yield _text(x + 18, TOP - 4, name)
        x += 40 + 7 * len(name)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" dominant-baseline="middle">'
        f"{escape(text)}</text>"
    )


def _line(points: Sequence[tuple[float, float]], color: str, *, width: float = 1) -> str:
    places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{_n(width)}"/>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _document(title: str, parts: Sequence[str], height: float) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}"',
            ' font-family="sans-serif" font-size="13" fill="#24292f" role="img">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="12" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )
