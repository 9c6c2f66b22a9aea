"""What the reports of runs share: a CSV file, a table in a Markdown page, a picture, a mean with its interval."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.maths.intervals import mean_interval


def mean_text(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """`0.613 ± 0.030`: the mean over the seeds and half of Student's 95 % interval; the value alone, if it is one."""
    if len(values) < 2:
        return "".join(f"{value:{sign}.{digits}f}" for value in values)
    interval = mean_interval(torch.tensor(values, dtype=torch.float64))
    return f"{interval.mean:{sign}.{digits}f} ± {interval.half_width:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]


def write(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]], table: Sequence[str]) -> None:
    """Write `path`.csv, and the Markdown table into `path`.md in the place of its first one; print the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)
    page = path.with_name(f"{path.name}.md")
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    start = next((i for i, line in enumerate(lines) if line.startswith("|")), len(lines))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    page.write_text("\n".join([*lines[:start], *table, *lines[end:]]) + "\n", encoding="utf-8")
    print("\n".join(table))


def draw(path: Path, size: tuple[float, float], plot: Callable[[Any], None]) -> None:
    """Write `path`.svg, a picture whose two axes `plot` fills; without matplotlib say so."""
    path = path.with_name(f"{path.name}.svg")
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install matplotlib")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.name}  # text as text, the same bytes each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    plot(axes)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
