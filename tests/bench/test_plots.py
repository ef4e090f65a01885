"""The plots are well-formed, and what they show follows from the values."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from bench import plots
from bench.plots import Bar

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ET.Element:
    """Parse a plot."""
    return ET.fromstring(text)  # noqa: S314  # it was made by the test


def texts(root: ET.Element) -> list[str]:
    """Return every text that a plot shows."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_bars_are_as_long_as_their_values_and_show_their_range() -> None:
    root = parse(
        plots.bars(
            "Rates", "/s", {"a": {"relay": Bar(50, 40, 60)}, "b": {"relay": Bar(100, 100, 100)}}
        )
    )
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if bar.get("x")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert len(list(root.iter(f"{SVG}polyline"))) == 1, "only the first has a range"
    assert {"Rates", "a", "b", "50 /s", "100 /s"} <= set(texts(root))


def test_series_have_colors_and_a_legend() -> None:
    root = parse(
        plots.bars(
            "t",
            "",
            {"a": {"relay": Bar(1, 1, 1), "bare": Bar(2, 2, 2)}, "b": {"bare": Bar(1, 1, 1)}},
        )
    )
    assert texts(root)[1:3] == ["relay", "bare"]
    colors = [bar.attrib["fill"] for bar in root.iter(f"{SVG}rect") if bar.get("height") == "16"]
    assert colors == [plots.COLORS[0], plots.COLORS[1], plots.COLORS[1]]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_line_goes_through_its_points(logarithmic: bool) -> None:
    root = parse(
        plots.lines("t", "x", "y", {"a": [(10, 0), (100, 5), (1000, 10)]}, logarithmic=logarithmic)
    )
    line = next(found for found in root.iter(f"{SVG}polyline") if found.get("stroke-width") == "2")
    (x0, y0), (x1, y1), (x2, y2) = (
        tuple(map(float, point.split(","))) for point in line.attrib["points"].split()
    )
    assert (y0 - y1) == pytest.approx(y1 - y2, abs=0.2)
    along = (x1 - x0) / (x2 - x0)
    assert along == pytest.approx(0.5 if logarithmic else 90 / 990, abs=0.01)
    first = (x0 - plots.LEFT / 2) / (x2 - plots.LEFT / 2)
    assert first == pytest.approx(0 if logarithmic else 10 / 1000, abs=0.01)


def test_texts_cannot_become_markup() -> None:
    hostile = '<script>"&'
    root = parse(plots.bars(hostile, hostile, {hostile: {hostile: Bar(1, 1, 1)}}))
    assert not list(root.iter(f"{SVG}script"))
    assert hostile in texts(root)


def test_the_same_values_give_the_same_file() -> None:
    groups = {"a": {"relay": Bar(1 / 3, 0.1, 0.7)}}
    assert plots.bars("t", "u", groups) == plots.bars("t", "u", groups)
