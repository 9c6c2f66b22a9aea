"""True score against KL of two systems: which one reaches a higher score at the same KL.

A point is one iteration of one run: mean true score and mean KL (nats per response) of the responses it was trained on.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

Z = 1.96
"""quantile of a normal 95 % interval"""
MIN_POINTS = 6
"""minimal number of points for a local line"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one system, all seeds together."""

    seed: np.ndarray
    """[N]"""
    iteration: np.ndarray
    """[N], from 1"""
    kl: np.ndarray
    """[N]"""
    score: np.ndarray
    """[N]"""

    def by_iteration(self, values: np.ndarray) -> np.ndarray:
        """Mean, least and greatest over the seeds at each iteration. [3, iterations]"""
        groups = [values[self.iteration == i] for i in np.unique(self.iteration)]
        return np.array([[f(group) for group in groups] for f in (np.mean, np.min, np.max)])


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """Both systems at one KL: (score, half of its 95 % interval)."""

    kl: float
    ours: tuple[float, float]
    other: tuple[float, float]

    @property
    def gain(self) -> float:
        return self.ours[0] - self.other[0]

    @property
    def gain_ci95(self) -> float:
        return float(np.hypot(self.ours[1], self.other[1]))

    @property
    def verdict(self) -> str:
        """Whether the interval of the difference lies above 0, below it, or holds it."""
        if np.isnan(self.gain_ci95):
            return "compared by too few points"
        if abs(self.gain) <= self.gain_ci95:
            return "equal within the interval"
        return "higher" if self.gain > 0 else "lower"


def local_line(x: np.ndarray, y: np.ndarray, at: float, width: float) -> tuple[float, float]:
    """The value at `at` of a straight line fitted to the points near it, and its standard error.

        min over a, b of sum_i w_i (y_i - a - b (x_i - at))^2,  w_i = exp(-((x_i - at) / width)^2 / 2)
    (local linear regression: Fan 1992). It is exact where the points lie on a line, at the ends too. The error takes
    the points as independent with one variance near `at`: sum_i l_i^2 s^2, a = sum_i l_i y_i.
    """
    weights = np.exp(-0.5 * ((x - at) / width) ** 2)
    design = np.stack([np.ones_like(x), x - at], axis=1)
    linear = np.linalg.pinv(design.T @ (weights[:, None] * design)) @ (design.T * weights)  # [2, N]
    a, b = linear @ y
    residuals = y - a - b * (x - at)
    count = weights.sum() ** 2 / (weights**2).sum()
    variance = (weights * residuals**2).sum() / weights.sum() * count / max(count - 2, 1e-9)
    return float(a), float(np.sqrt((linear[0] ** 2).sum() * variance)) if count > 2 else float("nan")


def common_kl_range(ours: Curve, other: Curve) -> tuple[float, float] | None:
    """The KLs (least, greatest) between which both systems were, by their means over seeds at each iteration."""
    ranges = [(means.min(), means.max()) for means in (c.by_iteration(c.kl)[0] for c in (ours, other))]
    low, high = max(e[0] for e in ranges), min(e[1] for e in ranges)
    return (float(low), float(high)) if low < high else None


def compare(ours: Curve, other: Curve, count: int = 7) -> list[FrontierPoint]:
    """Both at `count` KLs, evenly spaced over those that both reached; none if there are no such."""
    kl_range = common_kl_range(ours, other)
    if kl_range is None:
        return []
    width = (kl_range[1] - kl_range[0]) / (count - 1)
    points = []
    for kl in np.linspace(*kl_range, count):
        lines = (local_line(c.kl, c.score, kl, max(width, _distance(c.kl, kl))) for c in (ours, other))
        own_value, other_value = ((value, Z * error) for value, error in lines)
        points.append(FrontierPoint(float(kl), own_value, other_value))
    return points


def _distance(x: np.ndarray, at: float) -> float:
    """The distance from `at` to its MIN_POINTS-th nearest point: where points are sparse, a line uses a wider range."""
    return float(np.sort(np.abs(x - at))[:MIN_POINTS][-1])


def statement(points: list[FrontierPoint]) -> str:
    """The finding of the comparison in one or two sentences."""
    if not points:
        return "The two systems reached no KL in common: nothing is compared."
    if all(np.isnan(p.gain_ci95) for p in points):
        return "There are too few iterations for intervals: nothing is compared."
    counts = Counter(p.verdict for p in points)
    verdicts = ", ".join(f"{count} {name}" for name, count in counts.items())
    lower = sum(p.gain < 0 for p in points)
    finding = f"lower at {lower} of the {len(points)}" if lower else "at least as high at every KL"
    return (
        f"At {len(points)} KLs from {points[0].kl:.2f} to {points[-1].kl:.2f} nats, which both reached: our true score "
        f"is {finding} compared. By 95 % intervals of the difference: {verdicts}. The intervals take iterations as "
        "independent; those of one seed are less so."
    )
