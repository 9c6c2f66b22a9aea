"""What a source gives, and what one of its records must hold."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf.errors import UserError
from rlhf.types import Row

Phase = Literal["sft", "reward", "ppo"]

Record = dict[str, Any]


class Unusable(Exception):
    """A sound row that has nothing to train on; the message is the reason it is counted under."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What stands in place of a row that cannot be used."""

    reason: str
    """the reason it is counted under; of a bad row the whole message, `file:line: what`"""
    bad: bool = False
    """a mistake in the data, which stops the run unless skip_bad_rows allows for it"""


class Source(Protocol):
    """What the pipeline asks of a source, which `build(config, place)` of a file in data/sources returns.

    `rows` is required. A member with a value below is optional, and has that value if it is missing.
    """

    remote: bool = False
    """whether the hub must be asked what is there"""
    streaming: bool = False
    """whether the rows are read only as far as needed, as they may have no end"""
    fingerprint: Callable[[Phase], str | None] | None = None
    """(phase) -> a text that changes whenever the rows do; None, or a result of None: the rows are read to see that"""

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        """The rows for one phase, the same ones in the same order every time.

        A row of prompts only will do for ppo, a demonstration for sft and ppo, a preference for all three.
        """
        ...


def text(record: Record, column: str, where: str) -> str:
    """The text in one column.

    Raises: UserError if the column is missing or holds something else.
    """
    try:
        value = record[column]
    except KeyError:
        raise UserError(f"{where}: no column '{column}'; have {names(record)}") from None
    if type(value) is str and value.isascii():
        return value
    return checked(value, f"{where}: {column}")


def checked(value: object, where: str) -> str:
    """`value`, if it is text that UTF-8 can write.

    Raises: UserError for another type, or half of a surrogate pair, which no tokenizer takes.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: got {shown(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: got half a surrogate pair at character {error.start}, expected text") from None
    return value


def shown(value: object) -> str:
    """A value as JSON on one line, cut short."""
    try:
        whole = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, cycles, great depth
        whole = f"a {type(value).__name__}"
    return whole if len(whole) <= 60 else whole[:57] + "..."


def names(columns: Iterable[object]) -> str:
    """Names of columns, for an error; in a file without a header they may be long."""
    every = [name if name.isprintable() else ascii(name)[1:-1] for name in map(str, columns)]
    short = [name if len(name) <= 40 else name[:37] + "..." for name in every]
    return ", ".join(short[:30] + ["..."] * (len(short) > 30)) or "none"
