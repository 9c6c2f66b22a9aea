"""A record's columns by type, and the prompts of rows: what the adapters in data/sources are written in.

A column that is missing or holds something else raises UserError: `file:line: column: got 3, expected a number`.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from data.read.records import Record, Unusable, names, shown, text
from rlhf.errors import UserError
from rlhf.types import Message

ROLES = ("system", "user", "assistant")


def value(record: Record, column: str, where: str) -> Any:
    """Whatever is in one column."""
    if column not in record:
        raise UserError(f"{where}: no column '{column}'; have {names(record)}")
    return record[column]


def number(record: Record, column: str, where: str) -> float:
    """A finite number. True and False are none."""
    found = value(record, column, where)
    if not isinstance(found, bool) and isinstance(found, int | float):
        with contextlib.suppress(OverflowError):  # an integer may have any size
            if math.isfinite(found):
                return float(found)
    raise _mistake(found, column, where, "a number")


def flag(record: Record, column: str, where: str) -> bool | None:
    """True or False; None where the column is null or not there."""
    found = record.get(column)
    if found is not None and not isinstance(found, bool):
        raise _mistake(found, column, where, "true, false or null")
    return found


def one_of(record: Record, column: str, where: str, allowed: Sequence[str | int]) -> Any:
    """A value that must be one of `allowed`."""
    found = value(record, column, where)
    if isinstance(found, bool) or found not in allowed:
        raise _mistake(found, column, where, " or ".join(map(json.dumps, allowed)))
    return found


def struct(record: Record, column: str, where: str) -> Record:
    """A record inside a record."""
    found = value(record, column, where)
    if not isinstance(found, dict):
        raise _mistake(found, column, where, "an object with named columns")
    return found


def items(record: Record, column: str, where: str) -> list[Any]:
    """A list, empty perhaps."""
    found = value(record, column, where)
    if not isinstance(found, list):
        raise _mistake(found, column, where, "a list")
    return found


def structs(record: Record, column: str, where: str) -> list[tuple[str, Record]]:
    """(where, record) of each record in a list."""
    places = [(f"{column}[{i}]", found) for i, found in enumerate(items(record, column, where))]
    return [(f"{where}: {place}", struct({place: found}, place, where)) for place, found in places]


def messages(record: Record, column: str, where: str) -> tuple[Message, ...]:
    """A list of messages {role, content}, at least one."""
    found = structs(record, column, where)
    if not found:
        raise UserError(f"{where}: {column}: got [], expected a list of messages {{role, content}}")
    return tuple(Message(one_of(one, "role", at, ROLES), text(one, "content", at)) for at, one in found)


def kept(record: Record, *columns: str) -> dict[str, Any]:
    """Those of `columns` that are there, for reward functions."""
    return {column: record[column] for column in columns if column in record}


def asked(words: str) -> tuple[Message, ...]:
    """The prompt of one user's message."""
    return (Message("user", words),)


def dialogue(turns: Iterable[tuple[str, str]]) -> tuple[Message, ...]:
    """Messages of (role, words), neighbouring turns of one speaker made one, as chat templates want them."""
    joined: list[Message] = []
    for role, words in turns:
        if joined and joined[-1].role == role:
            words = f"{joined.pop().content}\n\n{words}".strip()
        joined.append(Message(role, words))
    return tuple(joined)


def before_response(turns: Sequence[Message]) -> tuple[Message, ...]:
    """The prompt that `turns` are, without an empty last turn of the assistant, which only opens the response.

    Raises: Unusable if it does not end in the user's turn.
    """
    prompt = tuple(turns[:-1] if turns and turns[-1] == Message("assistant", "") else turns)
    if not prompt or prompt[-1].role != "user":
        raise Unusable("prompt does not end in the user's turn")
    return prompt


def opening(prompt: Sequence[Message]) -> str:
    """The user's first words: the group that keeps a dialogue and its continuations in one split."""
    return next((message.content for message in prompt if message.role == "user"), "")


def _mistake(found: object, column: str, where: str, expected: str) -> UserError:
    return UserError(f"{where}: {column}: got {shown(found)}, expected {expected}")
