"""What metrics and warnings mean, read from the tables of docs/metrics.md: the page and the report have one text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf.shipped import METRICS_PAGE


@dataclass(frozen=True, slots=True)
class Meaning:
    """A row of a table of the page. Texts are Markdown."""

    name: str
    meaning: str
    unit: str = ""
    expected: str = ""
    """what it should be like"""
    cure: str = ""
    """what to do if it is not"""


def read_meanings(section: str = "", page: Path = METRICS_PAGE) -> dict[str, Meaning]:
    """The rows of all tables by name; of names that occur twice, the row below `section`, else the first."""
    here: dict[str, Meaning] = {}
    elsewhere: dict[str, Meaning] = {}
    for heading, meaning in _rows(page):
        (here if heading == section else elsewhere).setdefault(meaning.name, meaning)
    return elsewhere | here


def names_below(section: str, page: Path = METRICS_PAGE) -> list[str]:
    """The names of the rows below a heading."""
    return [meaning.name for heading, meaning in _rows(page) if heading == section]


def _rows(page: Path) -> Iterator[tuple[str, Meaning]]:
    """(heading, row) of all tables."""
    columns: list[str] = []
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
            continue
        for meaning in _row_meanings(dict(zip(columns, cells, strict=False)), cells[0]):
            yield heading, meaning


def _row_meanings(row: dict[str, str], names_cell: str) -> list[Meaning]:
    """A meaning for each name of a row."""
    if set(row.values()) <= {"---", ""}:
        return []
    limit = row.get("default", "")
    text = row.get("what it is") or row.get("when", "") + (f" (limit: {limit})" if limit else "")
    rest = row.get("unit", ""), row.get("what it should look like", ""), row.get("if it does not", "")
    return [Meaning(name, text, *rest) for name in re.findall(r"`(\w+)`", names_cell)]
