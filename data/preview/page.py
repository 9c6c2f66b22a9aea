"""The preview as a page: rows as the model sees them, and what became of all rows, in the look of the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from data.build.pipeline import Recipe
from data.dataset import PhaseData
from data.preview import show
from rlhf.errors import UserError
from rlhf.pages import page
from rlhf.pages.charts import Chart
from rlhf.pages.histogram import histogram

TEMPLATE = Path(__file__).parent / "preview.html.jinja"


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A table of the terminal as plain texts; the first column is the header of its row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PhasePreview:
    """One phase."""

    phase: str
    title: str
    rows: tuple[tuple[tuple[str, Sequence[show.TokenSegment]], ...], ...]
    """of each row its blocks: (title, segments)"""
    tables: tuple[PlainTable, ...]
    lengths: Chart | None
    batches: str


def describe_phase(opened: PhaseData, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int) -> PhasePreview:
    """What the page shows of a phase: its first `rows` training rows, and numbers on all."""
    train = opened.train
    blocks = [tuple(show.item_blocks(tokenizer, f"row {n}", item)) for n, item in enumerate(train[:rows], start=1)]
    lengths = [float(length) for length in train.lengths]
    return PhasePreview(
        phase=recipe.phase,
        title=f"{recipe.phase}: {len(train):,} rows to train on, {len(opened.evaluation):,} held out",
        rows=tuple(blocks),
        tables=tuple(map(_plain, show.tables(opened, recipe))),
        lengths=histogram("Length of a row", "tokens", [("rows", 0, lengths)], wide=True, width=1.0),
        batches=show.describe_batches(train),
    )


def _plain(table: Table) -> PlainTable:
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return PlainTable(tuple(str(column.header) for column in table.columns), tuple(zip(*cells, strict=True)))


def write(path: str, model: str, phases: Sequence[PhasePreview], errors: Sequence[str]) -> None:
    """Write the page. Raises: UserError if the file cannot be written."""
    html = page.render(
        TEMPLATE,
        title=f"{model}: preview of the data",
        model=model,
        sections=[(each.phase, each.phase) for each in phases],
        phases=phases,
        errors=errors,
        footer="Written by rlhf preview. A text longer than 3,000 characters is shown without its middle.",
    )
    try:
        page.write(Path(path), html)
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror}); name another file") from None
