"""What the reports of runs share: a CSV file, a table in a Markdown page, a picture."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a head and rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def write_table(page: Path, rows: Sequence[str]) -> None:
    """Put a Markdown table in the place of the first one of `page`, or into a new page; print it."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    start = next((i for i, line in enumerate(lines) if line.startswith("|")), len(lines))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    page.write_text("\n".join([*lines[:start], *rows, *lines[end:]]) + "\n", encoding="utf-8")
    print("\n".join(rows))


def draw(path: Path, shape: tuple[int, int], size: tuple[float, float], plot: Callable[[Any], None]) -> None:
    """Write a picture whose axes `plot` fills; without matplotlib say so. shape: rows and columns of axes"""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install matplotlib")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": path.name}  # text as text, the same bytes each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, figsize=size, layout="constrained")
    plot(axes)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
