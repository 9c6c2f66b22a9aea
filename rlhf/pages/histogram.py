"""Histograms on one axis."""

import math
from collections.abc import Sequence

from rlhf.pages.charts import Chart, Point, Series

BINS = 24
Groups = Sequence[tuple[str, int, Sequence[float]]]
"""(name, colour, values)"""


def histogram(title: str, x_name: str, groups: Groups, wide: bool = False) -> Chart | None:
    """Counts of the finite values of each group, in equal bins over all of them; None without values."""
    values = [value for _, _, group in groups for value in group if math.isfinite(value)]
    if not values:
        return None
    low, high = min(values), max(values)
    size = (high - low) / BINS or 1 / BINS
    series = []
    for name, colour, group in groups:
        counts = [0] * BINS
        for value in filter(math.isfinite, group):
            counts[min(BINS - 1, int((value - low) / size))] += 1
        bars = [Point(low + n * size, float(count)) for n, count in enumerate([*counts, 0])]
        series.append(Series(name, tuple(bars), colour, "steps"))
    most = max(point.y for each in series for point in each.points)
    return Chart(title, x_name, tuple(series), "count", y_range=(0.0, 1.2 * most), wide=wide)
