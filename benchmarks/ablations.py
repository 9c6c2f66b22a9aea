"""`python -m benchmarks.ablations --variants FILE --seeds 8`: does an option raise the true score at equal KL?

FILE is a YAML file of `name: options of train.py`; the first variant is the one that the others are compared with. Each
runs with every seed. A higher score at a higher KL is no gain, so scores are compared at the same KL: of each run, at
that KL, the value of a line fitted to the iterations near it (`local_line`). Runs of one seed share SFT model,
reward model, prompts and random numbers, so differences are paired: their mean over the seeds, with Student's interval.

Writes NAME.csv (a row for each run), the table in NAME.md, and NAME.svg. Runs that are finished are not repeated.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from benchmarks import page
from benchmarks.cells import Cell, CellOptions, by_variant, report_grid
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths.intervals import Interval, mean_interval

LAST = 3
"""iterations at the end of a run whose mean is its end"""
WIDTH = 0.5
"""how near, as a share of the KL, an iteration must be to count much in the score at that KL"""


class Options(CellOptions):
    """Which variants, and at which KLs they are compared."""

    kl: tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0, 2.0, 4.0), min_length=1)
    """KLs to the SFT model, nats per response; the picture has the last one"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant beside the default at one KL, over the seeds in which both reached it."""

    seeds: int
    score: float
    """mean of the variant"""
    difference: Interval | None
    """paired; None with fewer than two seeds"""

    @property
    def verdict(self) -> str:
        """Whether the interval of the difference lies above 0, below it, or holds it."""
        if self.difference is None:
            return "1 seed" if self.seeds else "not reached"
        return "higher" if self.difference.low > 0 else "lower" if self.difference.high < 0 else "equal"


def local_line(x: np.ndarray, y: np.ndarray, at: float, width: float) -> float:
    """The value at `at` of a straight line fitted to the points near it. It is exact where the points lie on a line.

        min over a, b of sum_i w_i (y_i - a - b (x_i - at))^2,  w_i = exp(-((x_i - at) / width)^2 / 2)
    (local linear regression: Fan 1992).
    """
    weights = np.exp(-0.5 * ((x - at) / width) ** 2)
    design = np.stack([np.ones_like(x), x - at], axis=1)
    linear = np.linalg.pinv(design.T @ (weights[:, None] * design)) @ (design.T * weights)  # [2, N]
    return float((linear @ y)[0])


def score_at(cell: Cell, kl: float) -> float | None:
    """The true score of a run at that KL; None if it never came so far."""
    x, y = np.array(cell.kl), np.array(cell.score)
    return local_line(x, y, kl, WIDTH * kl) if x.min() <= kl <= x.max() else None


def compare(default: Sequence[Cell], variant: Sequence[Cell], kl: float) -> Comparison:
    """The paired difference of two variants at that KL, over the seeds of both."""
    by_seed = {cell.seed: score_at(cell, kl) for cell in default}
    both = [
        (own, other)
        for cell in variant
        if (own := score_at(cell, kl)) is not None and (other := by_seed.get(cell.seed)) is not None
    ]
    differences = torch.tensor([own - other for own, other in both], dtype=torch.float64)
    interval = mean_interval(differences) if len(both) > 1 else None
    return Comparison(len(both), fmean(own for own, _ in both) if both else float("nan"), interval)


def table(runs: Mapping[str, Sequence[Cell]], options: Options) -> list[str]:
    """Markdown: each variant's end and its score at each KL; the difference and the seeds compared in brackets."""
    head = ["variant", *(f"at {kl:g} nats" for kl in options.kl), "end: true score", "KL", "distinct-2", "CPU s"]
    default, lines = next(iter(runs.values())), []
    for name, cells in runs.items():
        columns = [_entry(compare(default, cells, kl), cells is default) for kl in options.kl]
        end, kl = (fmean(fmean(getattr(cell, column)[-LAST:]) for cell in cells) for column in ("score", "kl"))
        distinct = fmean(cell.metrics["eval_distinct_2"] for cell in cells)
        seconds = fmean(cell.seconds for cell in cells)
        lines.append([name, *columns, f"{end:.3f}", f"{kl:.2f}", f"{distinct:.2f}", f"{seconds:.0f}"])
    return page.table(head, lines)


def _entry(comparison: Comparison, is_default: bool) -> str:
    c = comparison
    if is_default:
        return f"{c.score:.3f} [{c.seeds}]" if c.seeds else "not reached"
    if c.difference is None:
        return c.verdict
    text = f"{c.difference.mean:+.3f} ± {c.difference.half_width:.3f} [{c.seeds}]"
    return text if c.verdict == "equal" else f"**{text}**"


def rows(cells: Sequence[Cell], options: Options) -> tuple[list[str], list[list[Any]]]:
    """(head, a row for each run): its score at each KL, its end, and the last evaluation on held-out prompts."""
    heldout = ("eval_judge_before", "eval_judge", "eval_kl", "eval_distinct_2")
    lines = []
    for cell in cells:
        numbers = [score_at(cell, kl) for kl in options.kl]
        numbers += [fmean(cell.score[-LAST:]), fmean(cell.kl[-LAST:])]
        numbers += [*(cell.metrics[name] for name in heldout), cell.seconds]
        lines.append([cell.variant, cell.seed, *("" if x is None else f"{x:.5g}" for x in numbers)])
    return ["variant", "seed", *(f"at_{kl:g}" for kl in options.kl), "score", "kl", *heldout, "cpu_seconds"], lines


def plot(panels: Any, runs: Mapping[str, Sequence[Cell]], options: Options) -> None:
    """Differences with their intervals at the last KL, and true score against KL."""
    forest, curves = panels
    default, kl = next(iter(runs.values())), options.kl[-1]
    compared = {name: compare(default, cells, kl) for name, cells in runs.items()}
    intervals = {name: c.difference for name, c in reversed(compared.items()) if c.difference is not None}
    for i, (name, interval) in enumerate(intervals.items()):
        colour = {"higher": "tab:green", "lower": "tab:red"}.get(compared[name].verdict, "tab:gray")
        forest.plot([interval.low, interval.high], [i, i], color=colour, linewidth=2)
        forest.plot([interval.mean], [i], "o", color=colour)
    forest.set_yticks(range(len(intervals)), list(intervals))
    forest.axvline(0, color="black", linewidth=0.8)
    forest.set(xlabel=f"true score at {kl:g} nats minus that of '{next(iter(runs))}' (95 % interval)")
    for name, cells in runs.items():
        grid = np.linspace(0, max(max(cell.kl) for cell in cells), 40)[1:]
        values = [[score_at(cell, x) for cell in cells] for x in grid]
        means = [(x, fmean(v)) for x, row in zip(grid, values, strict=True) if None not in (v := row)]
        curves.plot(*zip(*means, strict=True) if means else ((), ()), label=name, linewidth=1.2)
    curves.set(xlabel="KL to the SFT model, nats per response", ylabel="true score, mean of the seeds")
    curves.legend(fontsize=7, ncols=2)
    for axes in (forest, curves):
        axes.grid(alpha=0.3)


def report(cells: Sequence[Cell], names: Sequence[str], options: Options) -> None:
    """Write NAME.csv, the table of NAME.md, and NAME.svg. names: all variants, in their order.

    Raises: UserError if the first variant, with which the others are compared, has no run.
    """
    runs, path = by_variant(cells, names), Path(options.results) / options.name
    if names[0] not in runs:
        raise UserError(f"{names[0]}: got no finished run, expected one of the variant that others are compared with")
    page.write(path, *rows(cells, options), table(runs, options))
    page.draw(path, (14, max(4.5, 1.5 + 0.28 * len(runs))), lambda panels: plot(panels, runs, options))


def main() -> int:
    """Exit code 1 if a run failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.ablations", "Options at equal KL.")
    return report_grid(options, report)


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
