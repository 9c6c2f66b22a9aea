"""Typed access to the columns of a record, and prompts built from rows. The adapters in data/sources use it.

A missing column, or a value of another type, raises UserError: `file:line: column: got 3, expected a number`. The
parameter `location` of all functions is that `file:line`.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from data.read.records import Record, Unusable, column_names
from rlhf.errors import UserError
from rlhf.text.messages import short_json
from rlhf.types import Message

ROLES = ("system", "user", "assistant", "tool")
GROUP_COLUMNS = ("group", "subset")
"""where the name of a row's group is, unless an option says it"""


def read_value(record: Record, column: str, location: str) -> Any:
    """The value in one column, of any type."""
    if column not in record:
        raise UserError(f"{location}: no column '{column}'; have {column_names(record)}")
    return record[column]


def read_number(record: Record, column: str, location: str) -> float:
    """A finite number. True and False are not numbers."""
    value = read_value(record, column, location)
    if not isinstance(value, bool) and isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # an integer may have any size
            if math.isfinite(value):
                return float(value)
    raise _wrong_type(value, column, location, "a number")


def read_flag(record: Record, column: str, location: str) -> bool | None:
    """True or False; None if the column is null or missing."""
    value = record.get(column)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(value, column, location, "true, false or null")
    return value


def read_choice(record: Record, column: str, location: str, allowed: Sequence[str | int]) -> Any:
    """A value that must be one of `allowed`."""
    value = read_value(record, column, location)
    if isinstance(value, bool) or value not in allowed:
        raise _wrong_type(value, column, location, " or ".join(map(json.dumps, allowed)))
    return value


def read_struct(record: Record, column: str, location: str) -> Record:
    """A record inside a record."""
    value = read_value(record, column, location)
    if not isinstance(value, dict):
        raise _wrong_type(value, column, location, "an object with named columns")
    return value


def read_list(record: Record, column: str, location: str) -> list[object]:
    """A list, which may be empty."""
    value = read_value(record, column, location)
    if not isinstance(value, list):
        raise _wrong_type(value, column, location, "a list")
    return value


def read_structs(record: Record, column: str, location: str) -> list[tuple[str, Record]]:
    """(location, record) of each record in a list."""
    elements = [(f"{column}[{i}]", value) for i, value in enumerate(read_list(record, column, location))]
    return [(f"{location}: {name}", read_struct({name: value}, name, location)) for name, value in elements]


def select_columns(record: Record, *columns: str) -> Record:
    """Those of `columns` that the record has. They become the row's columns, for reward functions."""
    return {column: record[column] for column in columns if column in record}


def subset_of(columns: Record, group_column: str | None = None) -> str:
    """The group that a row is evaluated with, as the option `group_column` and the row's columns name it."""
    names = [columns.get(name) for name in ([group_column] if group_column else GROUP_COLUMNS)]
    return next((str(name) for name in names if isinstance(name, str | int)), "")


def user_prompt(text: str) -> tuple[Message, ...]:
    """A prompt of one user message."""
    return (Message("user", text),)


def merge_messages(turns: Iterable[Message]) -> tuple[Message, ...]:
    """Messages in which consecutive ones of one role are merged, because chat templates alternate roles; results of
    tools, and messages with keys, are not."""
    merged: list[Message] = []
    for turn in turns:
        last = merged[-1] if merged else None
        apart = last is None or last.role != turn.role or turn.role == "tool" or last.learned != turn.learned
        if apart or turn.keys or (last and last.keys):
            merged.append(turn)
        elif last:
            merged[-1] = replace(last, content=f"{last.content}\n\n{turn.content}".strip())
    return tuple(merged)


def as_prompt(turns: Sequence[Message]) -> tuple[Message, ...]:
    """`turns` as a prompt. An empty last assistant turn is removed, because it only opens the response.

    Raises: Unusable if the prompt does not end in the user's turn.
    """
    prompt = tuple(turns[:-1] if turns and turns[-1] == Message("assistant", "") else turns)
    if not prompt or prompt[-1].role not in ("user", "tool"):
        raise Unusable("prompt does not end in the user's turn")
    return prompt


def first_user_text(prompt: Sequence[Message]) -> str:
    """The first user message. As a row's group, it keeps a dialogue and its continuations in one split."""
    return next((message.content for message in prompt if message.role == "user"), "")


def _wrong_type(value: object, column: str, location: str, expected: str) -> UserError:
    return UserError(f"{location}: {column}: got {short_json(value)}, expected {expected}")
