"""Checks of what a source yields. The sources in data/sources build rows from checked records; the rows of a user's
own source are checked here."""

from collections.abc import Iterator
from dataclasses import replace

from data.read.columns import ROLES, read_number
from data.read.records import DataSource, Phase, Skipped
from rlhf import plugins
from rlhf.errors import UserError
from rlhf.text.messages import require_text, short_json
from rlhf.types import Message, Row


def checked_rows(source: DataSource, phase: Phase, data_path: str) -> Iterator[Row | Skipped]:
    """The rows of a user's own `source`, each checked.

    Raises: UserError with the data path, the row's number and the mistake, or the line of the source that failed.
    """
    count = 0
    with plugins.CatchUserCode() as caught:
        rows = source.rows(phase)
        for row in rows:
            count += 1
            try:
                require_row(row)
            except UserError as error:
                raise UserError(f"{data_path}: row {count} of rows('{phase}'): {error}") from None
            yield replace(row, location=f"{data_path}: row {count}") if isinstance(row, Row) else row
    if caught.error is not None:
        location = plugins.error_location(caught.error)
        raise UserError(f"{data_path}: rows('{phase}') failed after {count} rows: {location}") from caught.error


def require_row(row: object) -> None:
    """Raises: UserError if `row` is neither a valid Row nor a valid Skipped."""
    if isinstance(row, Skipped):
        require_text(row.reason, "reason")
        return
    if not isinstance(row, Row):
        raise UserError(f"got {_describe(row)}, expected rlhf.types.Row")
    if not isinstance(row.prompt, tuple | list):
        raise UserError(f"prompt: got {_describe(row.prompt)}, expected a tuple of messages")
    for i, message in enumerate(row.prompt):
        if not isinstance(message, Message):
            raise UserError(f"prompt[{i}]: got {_describe(message)}, expected rlhf.types.Message")
        if message.role not in ROLES:
            raise UserError(f"prompt[{i}]: got the role {short_json(message.role)}, expected {', '.join(ROLES)}")
        require_text(message.content, f"prompt[{i}].content")
    for name in ("response", "rejected", "group", "ranking"):
        text = getattr(row, name)
        if text is not None or name in ("group", "ranking"):
            require_text(text, name)
    if row.rejected is not None and row.columns.get("margin") is not None:
        read_number(row.columns, "margin", "columns")


def _describe(value: object) -> str:
    """A value as JSON, or the type of an object that JSON cannot hold: its repr would be a memory address."""
    json_types = str | int | float | dict | list | None
    return short_json(value) if isinstance(value, json_types) else f"a value of type {type(value).__name__}"
