"""Figures as inline SVG: the geometry of lines, dots, whiskers, ticks and direct labels, in pure functions.

`draw` turns a Chart, which is in the units of the data, into a Drawing in pixels, which chart.html.jinja writes out.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlhf.pages.numbers import short, tick_labels, ticks

WIDTH, WIDE, HEIGHT = 380, 560, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 34
CHARACTER = 6.2
"""width of a character of a direct label"""
LABEL_HEIGHT = 13
MOST_POINTS = 160
"""points of a line that are drawn, unless a chart says otherwise"""
COLOURS = 8
Groups = Sequence[tuple[str, int, Sequence[float]]]
"""(name, colour, values)"""
BINS = 24
"""of a histogram"""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the data, with half of its 95 % interval in each direction if that is known."""

    x: float
    y: float
    x_half: float | None = None
    y_half: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the outline of a histogram; `colour` is a number below COLOURS."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    kind: Literal["line", "dotted", "path", "steps", "marks"] = "line"
    """dotted: a line with a dot at each point, which is a measurement of its own; path: connects the points in their
    order, for lines that turn back in x; steps: each point is the left edge of a bar, and the last one the right edge
    of the figure; marks: dots without a line"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure in the units of the data."""

    title: str
    x_name: str
    series: tuple[Series, ...]
    unit: str = ""
    level: tuple[float, str] | None = None
    """a value of y to compare with, and its name"""
    y_range: tuple[float, float] | None = None
    lowest: float | None = None
    """a point below it is drawn there as a triangle"""
    wide: bool = False
    most_points: int = MOST_POINTS
    """points of a line that are drawn; the extremes are always among them"""


@dataclass(frozen=True, slots=True)
class Stroke:
    """One SVG path."""

    d: str
    colour: int
    style: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text in the figure."""

    x: float
    y: float
    text: str
    colour: int | None = None
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure in pixels."""

    chart: Chart
    width: int
    height: int
    right: float
    """right end of the plot"""
    x_ticks: tuple[Text, ...]
    y_ticks: tuple[Text, ...]
    strokes: tuple[Stroke, ...]
    dots: tuple[tuple[float, float, int], ...]
    triangles: tuple[tuple[float, float, int], ...]
    """points below the chart's lowest value"""
    level: tuple[Stroke, Text] | None
    labels: tuple[Text, ...]
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM
    summary: str = ""


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: the first, the last, and the lowest and highest of equal parts between."""
    if len(points) <= most:
        return list(points)
    parts = max(1, (most - 2) // 2)
    chosen = {0, len(points) - 1}
    for i in range(parts):
        part = range(i * len(points) // parts, (i + 1) * len(points) // parts)
        chosen |= {min(part, key=lambda n: points[n].y), max(part, key=lambda n: points[n].y)}
    return [points[n] for n in sorted(chosen)]


def histogram(title: str, x_name: str, groups: Groups, wide: bool = False) -> Chart | None:
    """Counts of the finite values of each group, in equal bins over all of them; None without values."""
    finite = [(name, colour, [*filter(math.isfinite, group)]) for name, colour, group in groups]
    values = [value for _, _, group in finite for value in group]
    if not values:
        return None
    edges = np.histogram_bin_edges(values, BINS)
    series = []
    for name, colour, group in finite:
        counts = [*np.histogram(group, edges)[0], 0]
        bars = [Point(float(edge), float(count)) for edge, count in zip(edges, counts, strict=True)]
        series.append(Series(name, tuple(bars), colour, "steps"))
    most = max(point.y for each in series for point in each.points)
    return Chart(title, x_name, tuple(series), "count", y_range=(0.0, 1.2 * most), wide=wide)


def draw(chart: Chart) -> Drawing | None:
    """The figure in pixels; None if it has no points."""
    series = [
        (each, thin(each.points, chart.most_points) if each.kind != "steps" else list(each.points))
        for each in chart.series
        if each.points
    ]
    if not series:
        return None
    lowest = -math.inf if chart.lowest is None else chart.lowest
    below = [(point.x, each.colour) for each, points in series for point in points if point.y < lowest]
    series = [(each, [replace(point, y=max(point.y, lowest)) for point in points]) for each, points in series]
    x_scale, y_scale = _ranges(chart, [point for _, points in series for point in points])
    width = WIDE if chart.wide else WIDTH
    named = [each.name for each, _ in series if each.kind != "steps"] if len(series) > 1 else []
    right = width - max([RIGHT, *(8 + CHARACTER * len(name) for name in named)])
    scale = _Scale(x_scale, y_scale, right)
    strokes: list[Stroke] = []
    dots: list[tuple[float, float, int]] = []
    for each, points in series:
        strokes += _strokes(each, points, scale)
        if each.kind in ("dotted", "marks") or len(points) == 1 or _measured(points):
            dots += [(scale.x(point.x), scale.y(point.y), each.colour) for point in points]
    ends = [(scale.y(points[-1].y), each) for each, points in series] if named else []
    bars = [(each, points) for each, points in series if each.kind == "steps"]
    labels = [*_spread(ends, right), *_peaks(bars if len(bars) > 1 else [], scale)]
    first, last = series[0][1][0], series[0][1][-1]
    return Drawing(
        chart=chart, width=width, height=HEIGHT, right=right,
        x_ticks=tuple(Text(scale.x(t), HEIGHT - BOTTOM + 16, text) for t, text in tick_labels(ticks(*x_scale, 5))),
        y_ticks=tuple(Text(LEFT - 8, scale.y(t), text) for t, text in tick_labels(ticks(*y_scale, 5))),
        strokes=tuple(strokes), dots=tuple(dots),
        triangles=tuple((scale.x(x), scale.y(lowest), colour) for x, colour in below),
        level=_level(chart, scale), labels=tuple(labels),
        summary=f"{chart.title}: {series[0][0].name} from {short(first.y)} at {chart.x_name} {short(first.x)} "
        f"to {short(last.y)} at {chart.x_name} {short(last.x)}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scale:
    """From the units of the data to pixels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    right: float

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low) * (self.right - LEFT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)


def _ranges(chart: Chart, points: Sequence[Point]) -> tuple[tuple[float, float], tuple[float, float]]:
    xs = [value for p in points for value in (p.x - (p.x_half or 0), p.x + (p.x_half or 0))]
    ys = [value for p in points for value in (p.y - (p.y_half or 0), p.y + (p.y_half or 0))]
    ys += [chart.level[0]] if chart.level else []
    return _wide(xs, 0.0), chart.y_range or _wide(ys, 0.06)


def _wide(values: Sequence[float], margin: float) -> tuple[float, float]:
    """The range of the values with a margin; around a single value a range that is not empty."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(low)):
        span = abs(low) * 0.1 or 1.0
        return low - span, high + span
    extra = margin * (high - low)
    return (0.0 if 0 <= low < extra else low - extra), high + extra


def _strokes(series: Series, points: Sequence[Point], scale: _Scale) -> Iterable[Stroke]:
    """The paths of a series: its line, thin where it turns back and forth, and whiskers of intervals."""
    pixels = [(scale.x(point.x), scale.y(point.y)) for point in points]
    if series.kind == "steps":
        base = scale.y(0)
        corners = [(pixels[0][0], base)]
        for (x, y), (x_next, _) in itertools.pairwise(pixels):
            corners += [(x, y), (x_next, y)]
        yield Stroke(_path([*corners, (pixels[-1][0], base)]), series.colour, "area")
    elif series.kind != "marks":
        thin_line = series.kind == "path" and not _measured(points)
        yield Stroke(_path(pixels), series.colour, "raw" if thin_line else "line")
    for (x, y), point in zip(pixels, points, strict=True):
        if point.y_half:
            ends = [(x, scale.y(point.y - point.y_half)), (x, scale.y(point.y + point.y_half))]
            yield Stroke(_path(ends), series.colour, "whisker")
        if point.x_half:
            ends = [(scale.x(point.x - point.x_half), y), (scale.x(point.x + point.x_half), y)]
            yield Stroke(_path(ends), series.colour, "whisker")


def _measured(points: Sequence[Point]) -> bool:
    """Whether points have intervals; then they are few, and each is drawn as a dot."""
    return any(point.y_half is not None for point in points)


def _path(pixels: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in pixels)


def _level(chart: Chart, scale: _Scale) -> tuple[Stroke, Text] | None:
    if chart.level is None:
        return None
    y = scale.y(chart.level[0])
    text = Text(scale.right - 4, y - 5, chart.level[1], anchor="end")
    return Stroke(_path([(LEFT, y), (scale.right, y)]), 0, "level"), text


def _spread(ends: Sequence[tuple[float, Series]], right: float) -> list[Text]:
    """Direct labels at the right ends of the series, moved apart where they would overlap."""
    labels: list[Text] = []
    for y, series in sorted(ends, key=lambda end: end[0]):
        y = max(y, labels[-1].y + LABEL_HEIGHT) if labels else y
        labels.append(Text(right + 6, round(y, 1), series.name, series.colour))
    excess = labels[-1].y - (HEIGHT - BOTTOM) if labels else 0
    return [Text(t.x, t.y - max(0.0, excess), t.text, t.colour) for t in labels]


def _peaks(series: Sequence[tuple[Series, Sequence[Point]]], scale: _Scale) -> list[Text]:
    """The name of each histogram above its highest bar; a name that would cover another one moves up."""
    labels: list[Text] = []
    for each, points in series:
        bar = max(range(len(points) - 1), key=lambda n: points[n].y)
        middle = (scale.x(points[bar].x) + scale.x(points[bar + 1].x)) / 2
        half = CHARACTER * len(each.name) / 2
        x = min(max(middle, LEFT + half), scale.right - half)
        y = scale.y(points[bar].y) - 10
        while any(abs(y - t.y) < LABEL_HEIGHT and abs(x - t.x) < half + CHARACTER * len(t.text) / 2 for t in labels):
            y -= LABEL_HEIGHT
        labels.append(Text(x, y, each.name, each.colour, "middle"))
    return labels
