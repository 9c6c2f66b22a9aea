"""Records as a file holds them, and the protocol of a source, which turns them into rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf.errors import UserError
from rlhf.text.messages import require_text
from rlhf.types import Record, Row

Phase = Literal["sft", "reward", "ppo"]


class Unusable(Exception):
    """A valid row that cannot be trained on, such as a tie. The message is the reason under which it is counted."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Replaces a row that cannot be used."""

    reason: str
    """the reason under which the row is counted; for a bad row the whole message, `file:line: what`"""
    bad: bool = False
    """the data has an error, which stops the run unless skip_bad_rows allows it"""
    location: str = field(default="", compare=False)
    """file:line, where the reason does not say it"""


class DataSource(Protocol):
    """What the pipeline requires of a source, which `build(config, path)` of a file in data/sources returns.

    `rows` is required. The members with a default value below are optional.
    """

    remote: bool = False
    """whether the source reads from the hub"""
    streaming: bool = False
    """whether the rows are read only as far as needed, because there may be no last one"""
    fingerprint: Callable[[Phase], str | None] | None = None
    """(phase) -> a text that changes whenever the rows change; if it is None or returns None, all rows are read to
    compute one"""

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        """The rows for one phase, always the same ones in the same order.

        A row with only a prompt serves ppo, a demonstration serves sft and ppo, a preference serves all three.
        """
        ...


def read_text(record: Record, column: str, location: str) -> str:
    """The text in one column.

    Raises: UserError if the column is missing or does not hold text.
    """
    try:
        value = record[column]
    except KeyError:
        raise UserError(f"{location}: no column '{column}'; have {column_names(record)}") from None
    if type(value) is str and value.isascii():
        return value
    return require_text(value, f"{location}: {column}")


def without_padding(value: Any, of_tools: bool = False) -> Any:
    """A value of an Arrow table, without the nulls inside `tools` and `tool_calls`.

    Arrow gives each call the arguments of all functions, and null to those that the call does not have.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_padding(item, of_tools) for item in value]
    if not isinstance(value, dict):
        return value
    items = ((key, item) for key, item in value.items() if item is not None or not of_tools)
    return {key: without_padding(item, of_tools or key in ("tools", "tool_calls")) for key, item in items}


def column_names(columns: Iterable[object]) -> str:
    """Names of columns for an error message, shortened: without a header line, a CSV file has cells as its names."""
    printable = [name if name.isprintable() else ascii(name)[1:-1] for name in map(str, columns)]
    short = [name if len(name) <= 40 else name[:37] + "..." for name in printable]
    return ", ".join(short[:30] + ["..."] * (len(short) > 30)) or "none"
