"""Figures: ticks, scales, labels and thinned lines by hand; colours that can be read on both papers; texts as text."""

import itertools
import math
import re
from typing import Any

import pytest

from rlhf.pages import charts, page
from rlhf.pages.charts import Chart, Point, Series, draw, thin
from rlhf.pages.numbers import cell, short, tick_labels, ticks, with_half_width


def line(values: list[float], name: str = "a", **fields: int) -> Series:
    return Series(name, tuple(Point(float(x), y) for x, y in enumerate(values)), **fields)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 10.0, [0.0, 5.0, 10.0]),
        (-0.3, 2.2, [0.0, 1.0, 2.0]),
        (1e-5, 4e-5, [1e-5, 2e-5, 3e-5, 4e-5]),
        (-1e-15, 1e-15, [-1e-15, -5e-16, 0.0, 5e-16, 1e-15]),
        (1e12, 4e12, [1e12, 2e12, 3e12, 4e12]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 4) == pytest.approx(expected, abs=0)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 5e-4, 0.001, 0.0015, 0.002], ["0", "0.0005", "0.001", "0.0015", "0.002"]),
        ([-0.5, 0.0, 0.5], ["\u22120.5", "0", "0.5"]),
        ([0.0, 2e-6, 4e-6], ["0", "2e\u22126", "4e\u22126"]),
        ([1000.0, 2000.0], ["1,000", "2,000"]),
        ([11.1, 11.2], ["11.1", "11.2"]),
    ],
)
def test_the_labels_of_ticks_differ(values: list[float], texts: list[str]) -> None:
    assert tick_labels(values) == [*zip(values, texts, strict=True)]


def test_numbers_as_text() -> None:
    values = (0.0, -0.0, 0.25, 0.0123456, 12.3456, 123.456, 12345.6, -1.5, 2.5e-7, 3e9, math.nan)
    assert [*map(short, values)] == [
        "0", "0", "0.25", "0.012", "12.35", "123", "12,346", "\u22121.5", "2.5e\u22127", "3e9", "\u2013",
    ]  # fmt: skip
    assert with_half_width(0.8944, 0.0931) == ("0.894", "0.093") and with_half_width(-1e-9, 0.28) == ("0.00", "0.28")
    assert with_half_width(12.3, 4.56) == ("12.3", "4.6") and with_half_width(3.0, 0.0) == ("3", "0")
    assert (cell(1 / 3), cell(None), float(cell(5.76923e-06))) == ("0.333333", "", 5.76923e-06)


def test_a_point_is_drawn_where_it_is() -> None:
    """x from 0 to 4 is the whole width; y from 0 to 4 with a margin of 0.06 * 4, and 0 stays the lower end."""
    drawing = draw(Chart("t", "step", (line([0.0, 1.0, 4.0, 2.0, 3.0]),)))
    assert drawing is not None
    pixels = [float(number) for number in re.findall(r"-?[\d.]+", drawing.strokes[0].d)]
    height = charts.HEIGHT - charts.BOTTOM - charts.TOP
    for i, y in enumerate([0.0, 1.0, 4.0, 2.0, 3.0]):
        assert pixels[2 * i] == pytest.approx(charts.LEFT + i / 4 * (drawing.right - charts.LEFT), abs=0.06)
        assert pixels[2 * i + 1] == pytest.approx(charts.HEIGHT - charts.BOTTOM - y / 4.24 * height, abs=0.06)
    assert draw(Chart("t", "step", (Series("a", ()),))) is None


def test_points_below_the_lowest_value_are_triangles_there() -> None:
    """Of -50, -1, 0.5 the first is drawn at -1 and marked, and the scale begins at -1 less a margin of 0.06 * 1.5."""
    drawing = draw(Chart("t", "step", (line([-50.0, -1.0, 0.5]),), lowest=-1.0))
    assert drawing is not None
    y = charts.HEIGHT - charts.BOTTOM - 0.09 / 1.68 * (charts.HEIGHT - charts.BOTTOM - charts.TOP)
    assert drawing.triangles == ((charts.LEFT, pytest.approx(y, abs=0.06), 0),)
    assert f"M{charts.LEFT} {drawing.triangles[0][1]:g}L" in drawing.strokes[0].d


@pytest.mark.parametrize(
    ("kind", "dots", "styles"),
    [("marks", 2, ["whisker"]), ("dotted", 2, ["line", "whisker"]), ("line", 0, ["line", "whisker"])],
)
def test_marks_are_dots_without_a_line(kind: Any, dots: int, styles: list[str]) -> None:
    points = (Point(0.0, 1.0, x_half=0.5), Point(4.0, 2.0))
    drawing = draw(Chart("t", "step", (Series("a", points, kind=kind),)))
    assert drawing is not None and len(drawing.dots) == dots
    assert [stroke.style for stroke in drawing.strokes] == styles


def test_a_thinned_line_keeps_its_ends_and_extremes() -> None:
    points = [Point(float(i), math.sin(i / 50)) for i in range(5000)]
    points[1234] = Point(1234.0, 9.0)
    points[4321] = Point(4321.0, -9.0)
    remaining = thin(points, 100)
    assert len(remaining) <= 100 and {points[0], points[-1], points[1234], points[4321]} <= {*remaining}
    assert [p.x for p in remaining] == sorted(p.x for p in remaining)
    assert thin(points[:100], 100) == points[:100]


def test_labels_do_not_cover_each_other() -> None:
    lines = tuple(line([0.0, value], f"name {i}", colour=i) for i, value in enumerate((1.0, 1.01, 0.99, 5.0)))
    drawing = draw(Chart("t", "step", lines, level=(0.5, "guessing")))
    assert drawing is not None
    heights = sorted(label.y for label in drawing.labels)
    assert len(heights) == 4 and min(b - a for a, b in itertools.pairwise(heights)) >= charts.LABEL_HEIGHT
    assert drawing.right + charts.CHARACTER * len("name 0") < charts.WIDTH


def test_texts_and_markdown_are_escaped() -> None:
    assert page.inline("a `b<c` [d](e.md) <f>") == "a <code>b&lt;c</code> d &lt;f&gt;"
    assert page.visible("a\x00b\u202ec\u200dd\n") == "a\\x00b\\u202ec\u200dd\n"  # a joiner belongs to the text
    assert len(page.visible("x" * 10**6)) < page.MOST_CHARACTERS + 60
