"""What a source must give. Those in data/sources make rows of checked records; a user's own is held to its word."""

import datetime
import decimal
from collections.abc import Iterable, Iterator
from types import NoneType, TracebackType
from typing import Any

from data.read.columns import ROLES, number
from data.read.records import Phase, Skipped, Source, checked, shown
from rlhf.errors import UserError
from rlhf.types import Message, Row

PLAIN = (str, int, float, datetime.date, datetime.time, decimal.Decimal, bytes, NoneType)
"""what a column may hold, besides lists and mappings of it"""


def checked_rows(source: Source, phase: Phase, location: str) -> Iterator[Row | Skipped]:
    """The rows of `source`, each one of them whole.

    An error inside the source stays what it is, with its traceback, and a note of how many rows had come before it.
    Raises: UserError with the location, the row's number and what is wrong with it.
    """
    with _Counted(location, phase) as counted:
        found = source.rows(phase)
        if not isinstance(found, Iterable):
            raise UserError(f"{location}: rows('{phase}') gave {_named(found)}, expected an iterator of rows")
        for row in found:
            counted.rows += 1
            try:
                require_row(row)
            except UserError as mistake:
                raise UserError(f"{location}: row {counted.rows} of rows('{phase}'): {mistake}") from None
            yield row


class _Counted:
    """Says of an error how many rows had come before it."""

    def __init__(self, location: str, phase: Phase) -> None:
        self.location, self.phase, self.rows = location, phase, 0

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            error.add_note(f"{self.location}: rows('{self.phase}') failed after {self.rows} rows")


def require_row(row: object) -> None:
    """Raises: UserError saying what keeps `row` from being a row."""
    if isinstance(row, Skipped):
        checked(row.reason, "reason")
        return
    if not isinstance(row, Row):
        raise UserError(f"got {_named(row)}, expected rlhf.types.Row")
    if not isinstance(row.prompt, tuple | list):
        raise UserError(f"prompt: got {_named(row.prompt)}, expected a tuple of messages")
    for i, message in enumerate(row.prompt):
        _require_message(message, f"prompt[{i}]")
    for name, text in (("response", row.response), ("rejected", row.rejected)):
        if text is not None:
            checked(text, name)
    checked(row.group, "group")
    checked(row.ranking, "ranking")
    _require_columns(row)


def _require_message(message: object, where: str) -> None:
    if not isinstance(message, Message):
        raise UserError(f"{where}: got {_named(message)}, expected rlhf.types.Message")
    if message.role not in ROLES:
        raise UserError(f"{where}: got the role {shown(message.role)}, expected system, user or assistant")
    checked(message.content, f"{where}.content")


def _require_columns(row: Row) -> None:
    if not isinstance(row.columns, dict):
        raise UserError(f"columns: got {_named(row.columns)}, expected a dict")
    try:
        wrong = _not_plain(row.columns, "columns")
    except RecursionError:
        wrong = "columns: nested too deeply"
    if wrong:
        raise UserError(f"{wrong}; expected text, numbers, lists and mappings with names that are text")
    if row.rejected is not None and row.columns.get("margin") is not None:
        number(row.columns, "margin", "columns")


def _not_plain(value: Any, where: str) -> str:
    """What in `value` JSON cannot hold, or an empty string."""
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            return f"{where}: got the name {_named(odd[0])}"
        return next(filter(None, (_not_plain(inner, f"{where}.{key}") for key, inner in value.items())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value))), "")
    return "" if isinstance(value, PLAIN) else f"{where}: got {_named(value)}"


def _named(value: object) -> str:
    """A value as JSON; of an object of another kind its type, for its address would say nothing."""
    json_types = str | int | float | dict | list | None
    return shown(value) if isinstance(value, json_types) else f"a value of type {type(value).__name__}"
