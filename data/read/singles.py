"""Readers of records with one response or none: demonstrations, labelled responses, dialogues, text, prompts.

A reader gets the columns of its shape, the record, its location, and the columns that the shape does not use.
"""

from collections.abc import Callable, Sequence

from data.read.columns import as_prompt, first_user_text
from data.read.dialogues import (
    join_prompt,
    read_dialogue,
    read_prompt,
    read_response,
    strip_speaker,
    with_system_message,
)
from data.read.rankings import rank_by_order
from data.read.records import Record, read_text
from data.read.table import Labelled, Parsed, Ranked, Unanswered
from rlhf.errors import UserError
from rlhf.text.messages import short_json
from rlhf.types import Message, Row

Reader = Callable[[Sequence[str], Record, str, Record], Parsed]
"""(columns of the shape, record, location, columns that the shape does not use) -> what the record says"""
LABELS = {"true": True, "1": True, True: True, "false": False, "0": False, False: False}
"""the numbers 1 and 0, of any type, count as true and false"""


def read_single(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row | Ranked:
    """A prompt and its response; a list of outputs is ranked, the best one first."""
    prompt_column, column = columns
    if column == "output" and isinstance(record[column], list):
        return rank_by_order(read_prompt(record, prompt_column, location), record, column, location, extra)
    before, response = read_response(record, column, location)
    prompt = join_prompt(record, prompt_column, before, location)
    response = strip_speaker(record, prompt_column, response)
    keys, weight = response.keys, float(response.learned)
    return Row(prompt, response.content, None, first_user_text(prompt), extra, response_keys=keys, weight=weight)


def read_labelled(read: Reader, columns: Sequence[str], record: Record, location: str, extra: Record) -> Labelled:
    """One response, which `read` reads, and whether it is good, in the last column."""
    *others, column = columns
    row = read(others, record, location, extra)
    if not isinstance(row, Row) or row.response is None:
        raise UserError(f"{location}: got a label but no single response, expected one response that is good or bad")
    if row.response_keys or not row.weight:
        raise UserError(f"{location}: got keys beside the response's content and a label, expected a pair or no label")
    label = record[column]
    key = label.lower() if isinstance(label, str) else label
    good = LABELS.get(key) if isinstance(key, str | int | float) else None
    if good is None:
        cure = f"if the column has another meaning, write files,shape={'-'.join(others)}:PATH"
        got = short_json(label)
        raise UserError(f"{location}: {column}: got {got}, expected true or false (good or bad); {cure}")
    return Labelled(row.prompt, row.response, good, row.group, row.columns)


def read_conversation(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row | Unanswered:
    """A dialogue up to its last answer that is learned; one that ends in the user's turn is a prompt too."""
    turns = with_system_message(record, read_dialogue(record, columns[0], location), location)
    group = first_user_text(turns)
    # What follows the last learned turn is no context of anything.
    answers = [i for i, turn in enumerate(turns) if turn.role == "assistant" and turn.learned]
    if turns[-1].role == "assistant":
        last, weight = (answers or [len(turns) - 1])[-1], float(bool(answers))
        return _answered(turns, last, group, extra, weight)
    whole = Row(as_prompt(turns), None, None, group, extra)
    return Unanswered(whole, _answered(turns, answers[-1], group, extra)) if answers else whole


def _answered(turns: tuple[Message, ...], last: int, group: str, extra: Record, weight: float = 1.0) -> Row:
    """A dialogue up to its turn number `last`, which is the response."""
    answer = turns[last]
    return Row(turns[:last], answer.content, None, group, extra, response_keys=answer.keys, weight=weight)


def read_plain_text(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row:
    """Text without a prompt."""
    return Row((), read_text(record, columns[0], location), None, "", extra)


def read_prompt_only(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row:
    """A prompt without a response."""
    prompt = read_prompt(record, columns[0], location)
    return Row(prompt, None, None, first_user_text(prompt), extra)
