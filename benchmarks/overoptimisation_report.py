"""The report of benchmarks/overoptimisation.py: the laws of Gao et al. 2023 (2210.10760), a table and a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import page
from rlhf.maths.intervals import Interval, mean_interval

BEST_OF_N = "best of n"
PPO = "PPO"


@dataclass(frozen=True, slots=True)
class Points:
    """Of one seed and reward model: where each policy is. All [N]."""

    method: str
    """best of n or PPO; with a remedy or an ensemble `METHOD, NAME`"""
    pairs: int
    seed: int
    kl: np.ndarray
    """nats per response"""
    gold: np.ndarray
    """gain in true score over the SFT policy"""
    proxy: np.ndarray
    """gain in the score that was maximised"""
    agreement: float
    """share of pairs of responses of the SFT policy that this score orders as the judge does"""


@dataclass(frozen=True, slots=True)
class Law:
    """gain(d) = d (alpha - beta f(d)), f(d) = d for best of n and ln d for RL."""

    logarithmic: bool
    alpha: float
    beta: float
    r2: float = math.nan
    """share of the variance of the gains that it explains"""

    def gain(self, d: np.ndarray) -> np.ndarray:
        return d * (self.alpha - self.beta * (np.log(d) if self.logarithmic else d))

    @property
    def peak(self) -> tuple[float, float]:
        """(d, gain) of the maximum; infinite without over-optimisation, which is beta <= 0."""
        if self.beta <= 0:
            return math.inf, math.inf
        d = math.exp(self.alpha / self.beta - 1) if self.logarithmic else self.alpha / (2 * self.beta)
        return d, float(self.gain(np.array(d)))


def fit(d: np.ndarray, gain: np.ndarray, logarithmic: bool) -> Law:
    """Least squares over the points with d > 0."""
    d, gain = d[d > 0], gain[d > 0]
    design = np.stack([d, -d * (np.log(d) if logarithmic else d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(design, gain, rcond=None)
    residual = gain - design @ np.array([alpha, beta])
    return Law(logarithmic, float(alpha), float(beta), float(1 - (residual**2).mean() / gain.var()))


def groups(points: Sequence[Points]) -> dict[tuple[str, int], list[Points]]:
    """The points of each method and size, one entry a seed, in the order of their first seed."""
    by_size: dict[tuple[str, int], list[Points]] = {}
    for p in points:
        by_size.setdefault((p.method, p.pairs), []).append(p)
    return by_size


def laws(seeds: Sequence[Points]) -> list[Law]:
    """The fit of each seed of one method and size."""
    return [fit(np.sqrt(p.kl), p.gold, not p.method.startswith(BEST_OF_N)) for p in seeds]


def interval(values: Sequence[float]) -> Interval:
    return mean_interval(torch.tensor(values, dtype=torch.float64))


def table(points: Sequence[Points]) -> list[str]:
    """Markdown: a row for each method and size."""
    lines = [
        "| method | pairs | agreement with the judge | alpha | beta | R² | largest gain measured | at KL "
        "| gain at the end | end KL |",
        "|---" * 10 + "|",
    ]
    for (method, pairs), seeds in groups(points).items():
        fits = laws(seeds)
        alpha, beta = (_text(interval([getattr(law, name) for law in fits])) for name in ("alpha", "beta"))
        best = [(p.gold.max(), p.kl[p.gold.argmax()], p.gold[-1], p.kl[-1]) for p in seeds]
        columns = list(zip(*best, strict=True))
        agreement, r2 = np.mean([p.agreement for p in seeds]), np.mean([law.r2 for law in fits])
        lines.append(
            f"| {method} | {pairs} | {agreement:.3f} | {alpha} | {beta} | {r2:.2f} "
            f"| {_text(interval(columns[0]))} | {np.mean(columns[1]):.1f} "
            f"| {_text(interval(columns[2]))} | {np.mean(columns[3]):.1f} |"
        )
    return lines


def _text(i: Interval) -> str:
    return f"{i.mean:.3f} ± {i.half_width:.3f}"


def plot(panels: Any, points: Sequence[Points], middle: int) -> None:
    """Gain in true score against sqrt(KL), and the mean of the seeds' laws: of each size, and of all methods of the
    middle one."""
    for row, family, law in zip(panels, (BEST_OF_N, PPO), ("d (alpha - beta d)", "d (alpha - beta ln d)"), strict=True):
        for (method, pairs), seeds in groups(points).items():
            if method == family:
                _draw_gains(row[0], f"{pairs} pairs", seeds)
            if method.startswith(family) and pairs == middle:
                _draw_gains(row[1], method, seeds)
        for axes, title in zip(row, (f"{family}: {law}", f"{family} from {middle} pairs"), strict=True):
            axes.set(xlabel="d = sqrt(KL to the SFT policy, nats)", ylabel="gain in true score", title=title)
            axes.grid(alpha=0.3)
            axes.legend()


def _draw_gains(axes: Any, label: str, seeds: Sequence[Points]) -> None:
    d, gain = (np.concatenate(values) for values in ([np.sqrt(p.kl) for p in seeds], [p.gold for p in seeds]))
    (line,) = axes.plot(d, gain, ".", alpha=0.35)
    grid = np.linspace(0.02, d.max(), 100)
    axes.plot(grid, np.mean([law.gain(grid) for law in laws(seeds)], axis=0), color=line.get_color(), label=label)


def report(points: Sequence[Points], middle: int, results: Path) -> None:
    """Write overoptimisation.csv, the table of the page overoptimisation.md, and overoptimisation.svg."""
    results.mkdir(parents=True, exist_ok=True)
    rows = (
        [p.method, p.pairs, p.seed, *(f"{value:.5g}" for value in row)]
        for p in points
        for row in zip(p.kl, p.gold, p.proxy, strict=True)
    )
    page.write_csv(results / "overoptimisation.csv", ["method", "pairs", "seed", "kl", "gold_gain", "proxy_gain"], rows)
    page.write_table(results / "overoptimisation.md", table(points))
    page.draw(results / "overoptimisation.svg", (2, 2), (13, 9), lambda panels: plot(panels, points, middle))
