"""`python -m benchmarks.ablations --variants FILE --seeds 8`: does an option raise the true score at equal KL?

FILE is a YAML file of `name: options of train.py`; the first variant is the one that the others are compared with. Each
runs with every seed. A higher score at a higher KL is no gain, so scores are compared at the same KL: of each run, at
that KL, the value of a line fitted to the iterations near it (frontier.local_line). Runs of one seed share SFT model,
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
from benchmarks.cells import ROOT, Cell, CellOptions, read_variants, report_grid
from benchmarks.frontier import local_line
from rlhf import errors
from rlhf.config import parser
from rlhf.errors import UserError
from rlhf.maths.intervals import Interval, mean_interval

LAST = 3
"""iterations at the end of a run whose mean is its end"""


class Options(CellOptions):
    """Which variants, and at which KLs they are compared."""

    variants: str = str(ROOT / "benchmarks" / "variants" / "stories.yaml")
    """YAML file of the variants"""
    kl: tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0, 2.0, 4.0), min_length=1)
    """KLs to the SFT model, nats per response; the picture has the last one"""
    width: float = Field(0.5, gt=0)
    """how near, as a share of the KL, an iteration must be to count much in the score at that KL"""
    results: str = "docs/results"
    """directory of the report"""
    name: str = "ablations"
    """name of the report's files"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant beside the default at one KL, over the seeds in which both reached it."""

    kl: float
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


def score_at(cell: Cell, kl: float, width: float) -> float | None:
    """The true score of a run at that KL; None if it never came so far. width: as of Options."""
    x, y = np.array(cell.kl), np.array(cell.score)
    if not x.min() <= kl <= x.max():
        return None
    return local_line(x, y, kl, width * kl)[0]


def compare(default: Sequence[Cell], variant: Sequence[Cell], kl: float, width: float) -> Comparison:
    """The paired difference of two variants at that KL, over the seeds of both."""
    by_seed = {cell.seed: score_at(cell, kl, width) for cell in default}
    both = [
        (own, other)
        for cell in variant
        if (own := score_at(cell, kl, width)) is not None and (other := by_seed.get(cell.seed)) is not None
    ]
    differences = torch.tensor([own - other for own, other in both], dtype=torch.float64)
    interval = mean_interval(differences) if len(both) > 1 else None
    return Comparison(kl, len(both), fmean(own for own, _ in both) if both else float("nan"), interval)


def by_variant(cells: Sequence[Cell], names: Sequence[str]) -> dict[str, list[Cell]]:
    """The cells of each variant that has some, in the order of `names`.

    Raises: UserError if the first, with which the others are compared, has none.
    """
    runs = {name: [cell for cell in cells if cell.variant == name] for name in names}
    if not runs[names[0]]:
        raise UserError(f"{names[0]}: got no finished run, expected one of the variant that others are compared with")
    return {name: own for name, own in runs.items() if own}


def table(runs: Mapping[str, Sequence[Cell]], options: Options) -> list[str]:
    """Markdown: each variant's end and its score at each KL; the difference and the seeds compared in brackets."""
    heads = [f"at {kl:g} nats" for kl in options.kl]
    lines = [f"| variant | {' | '.join(heads)} | end: true score | KL | distinct-2 | CPU s |"]
    lines.append("|---" * (len(heads) + 5) + "|")
    default = next(iter(runs.values()))
    for name, cells in runs.items():
        columns = [_entry(compare(default, cells, kl, options.width), cells is default) for kl in options.kl]
        end, kl = (fmean(fmean(getattr(cell, column)[-LAST:]) for cell in cells) for column in ("score", "kl"))
        distinct = fmean(cell.metrics["eval_distinct_2"] for cell in cells)
        seconds = fmean(cell.seconds for cell in cells)
        lines.append(f"| {name} | {' | '.join(columns)} | {end:.3f} | {kl:.2f} | {distinct:.2f} | {seconds:.0f} |")
    return lines


def _entry(comparison: Comparison, is_default: bool) -> str:
    c = comparison
    if is_default:
        return f"{c.score:.3f} [{c.seeds}]" if c.seeds else "not reached"
    if c.difference is None:
        return c.verdict
    text = f"{c.difference.mean:+.3f} ± {c.difference.half_width:.3f} [{c.seeds}]"
    return text if c.verdict == "equal" else f"**{text}**"


def write_csv(path: Path, cells: Sequence[Cell], options: Options) -> None:
    """A row for each run: its score at each KL, its end, and the last evaluation on held-out prompts."""
    heldout = ("eval_judge_before", "eval_judge", "eval_kl", "eval_distinct_2")
    rows = []
    for cell in cells:
        numbers = [score_at(cell, kl, options.width) for kl in options.kl]
        numbers += [fmean(cell.score[-LAST:]), fmean(cell.kl[-LAST:])]
        numbers += [*(cell.metrics[name] for name in heldout), cell.seconds]
        rows.append([cell.variant, cell.seed, *("" if x is None else f"{x:.5g}" for x in numbers)])
    head = ["variant", "seed", *(f"at_{kl:g}" for kl in options.kl), "score", "kl", *heldout, "cpu_seconds"]
    page.write_csv(path, head, rows)


def plot(panels: Any, runs: Mapping[str, Sequence[Cell]], options: Options) -> None:
    """Differences with their intervals at the last KL, and true score against KL."""
    forest, curves = panels
    default, kl = next(iter(runs.values())), options.kl[-1]
    compared = {name: compare(default, cells, kl, options.width) for name, cells in runs.items()}
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
        values = [[score_at(cell, x, options.width) for cell in cells] for x in grid]
        means = [(x, fmean(v)) for x, row in zip(grid, values, strict=True) if None not in (v := row)]
        curves.plot(*zip(*means, strict=True) if means else ((), ()), label=name, linewidth=1.2)
    curves.set(xlabel="KL to the SFT model, nats per response", ylabel="true score, mean of the seeds")
    curves.legend(fontsize=7, ncols=2)
    for axes in (forest, curves):
        axes.grid(alpha=0.3)


def report(cells: Sequence[Cell], names: Sequence[str], options: Options) -> None:
    """Write NAME.csv, the table of NAME.md, and NAME.svg. names: all variants, in their order. Raises: UserError."""
    runs, results = by_variant(cells, names), Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    write_csv(results / f"{options.name}.csv", cells, options)
    page.write_table(results / f"{options.name}.md", table(runs, options))
    size = 14, max(4.5, 1.5 + 0.28 * len(runs))
    page.draw(results / f"{options.name}.svg", (1, 2), size, lambda panels: plot(panels, runs, options))


def main() -> int:
    """Exit code 1 if a run failed."""
    options = parser.parse(Options, sys.argv[1:], "python -m benchmarks.ablations", "Options at equal KL.")
    return report_grid(options, read_variants(options.variants), report)


if __name__ == "__main__":
    raise SystemExit(errors.run_as_user(main))
