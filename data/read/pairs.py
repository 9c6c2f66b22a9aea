"""Readers of pairs: a chosen response and a rejected one, with their prompt.

A reader gets the columns of its shape, the record, its location, and the columns that the shape does not use.
"""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from data.read.columns import GROUP_COLUMNS, as_prompt, first_user_text, read_number, read_struct
from data.read.dialogues import (
    join_prompt,
    read_dialogue,
    read_optional_text,
    read_prompt,
    read_response,
    read_response_text,
    strip_speaker,
    with_system_message,
)
from data.read.records import Record, Unusable
from data.read.table import Ranked
from rlhf.errors import UserError
from rlhf.text.messages import short_json
from rlhf.types import Message, Row

SIDES = ("chosen", "rejected")
NAMED = ("margin", *GROUP_COLUMNS)
"""columns of a pair with a meaning of their own"""
PROMPT_NAMES = ("input", "query", "user_input", "problem")
"""columns in which files of other tools have the prompt"""


def read_pair(
    columns: Sequence[str], record: Record, location: str, extra: Record, sides: tuple[str, str] = SIDES
) -> Row | Ranked:
    """A prompt and its two responses, in the columns `sides`."""
    prompt_column = columns[0]
    if any(map(_is_several, map(record.__getitem__, sides))):
        return _read_sides_of_several(prompt_column, record, location, extra, sides)
    before, chosen, rejected = _read_sides(record, location, sides)
    prompt = join_prompt(record, prompt_column, before, location)
    chosen, rejected = (strip_speaker(record, prompt_column, response) for response in (chosen, rejected))
    return _pair(prompt, chosen, rejected, _read_pair_columns(extra, location))


def _pair(prompt: tuple[Message, ...], chosen: Message, rejected: Message, columns: Record) -> Row:
    """A pair; a response with a flag against the loss gives it the weight 0."""
    weight = float(chosen.learned and rejected.learned)
    row = Row(prompt, chosen.content, rejected.content, first_user_text(prompt), columns, weight=weight)
    return replace(row, response_keys=chosen.keys, rejected_keys=rejected.keys)


def _is_several(value: object) -> bool:
    """Whether a side of a pair is a list of responses, and not one response as a list of messages."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], dict)


def _read_sides_of_several(
    prompt_column: str, record: Record, location: str, extra: Record, sides: tuple[str, str]
) -> Ranked:
    """Several responses on one side, as in best-of-4 files: each chosen response with each rejected one."""
    responses: list[tuple[str, float]] = []
    for column, rating in zip(sides, (1.0, 0.0), strict=True):
        values = record[column] if _is_several(record[column]) else [record[column]]
        elements = {f"{column}[{i}]": value for i, value in enumerate(values)}
        texts = (Message("assistant", read_response_text(elements, name, location)) for name in elements)
        responses += [(strip_speaker(record, prompt_column, text).content, rating) for text in texts]
    prompt = read_prompt(record, prompt_column, location)
    return Ranked(prompt, tuple(responses), first_user_text(prompt), _read_pair_columns(extra, location))


def read_pair_without_prompt(_columns: Sequence[str], record: Record, location: str, extra: Record) -> Row:
    """Two dialogues or texts with the same beginning, or two responses to the dialogue in `messages`."""
    before, chosen, rejected = _read_sides(record, location)
    if before:
        prompt = with_system_message(record, as_prompt(before), location)
    elif "messages" in record:
        prompt = read_prompt(record, "messages", location)
    else:
        beginning = "" if _names_another_prompt(record, extra) else _common_words(chosen.content, rejected.content)
        if not beginning:
            raise UserError(
                f"{location}: chosen: got no prompt before it, and there is no column 'prompt'; "
                f"{_missing_prompt_cure(record, extra)}"
            )
        prompt = with_system_message(record, (Message("user", beginning),), location)
        chosen, rejected = (replace(side, content=side.content[len(beginning) :]) for side in (chosen, rejected))
    return _pair(prompt, chosen, rejected, _read_pair_columns(extra, location))


def read_pair_in_dialogue(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row:
    """A dialogue that ends in the chosen response, and the rejected one, alone or behind the same messages."""
    before, chosen, rejected = _read_sides(record, location, (columns[0], columns[1]), both_have_prompt=False)
    prompt = with_system_message(record, as_prompt(before), location)
    return _pair(prompt, chosen, rejected, _read_pair_columns(extra, location))


def _names_another_prompt(record: Record, extra: Record) -> bool:
    """Whether the prompt of a pair may be elsewhere than at the beginning of two texts."""
    has_texts = all(isinstance(record[side], str) for side in SIDES)
    other_texts = [name for name, value in extra.items() if isinstance(value, str) and name not in NAMED]
    return not has_texts or _is_dialogue(record["chosen"]) or bool(other_texts)


def _is_dialogue(text: str) -> bool:
    return text.lstrip().startswith("Human:")


def _common_words(first: str, second: str) -> str:
    """The words with which both texts begin: an implicit prompt as of TRL's `extract_prompt`, but never half a word."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    common = first[: sum(1 for _ in same)]
    if not all(text[len(common) :][:1].isspace() or text == common for text in (first, second)):
        common = common[: len(common) - len(re.split(r"\s", common)[-1])]
    return common.rstrip()


def read_preferred(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row:
    """A pair as OpenAI's preference files have it: the prompt is the messages in `input`."""
    prompt_column, *sides = columns
    dialogue = read_struct(record, prompt_column, location)
    if dialogue.get("tools"):
        raise UserError(f"{location}: input: got tools inside it, expected a column tools beside prompt and responses")
    prompt = as_prompt(read_dialogue(dialogue, "messages", f"{location}: input"))
    chosen, rejected = (read_response(record, side, location)[1] for side in sides)
    return _pair(prompt, chosen, rejected, extra)


def read_voted(columns: Sequence[str], record: Record, location: str, extra: Record) -> Row | Ranked:
    """Two responses and a person's preference. Raises: Unusable for a tie, and if the preference is empty."""
    _, first, second, preference = columns
    vote = read_optional_text(record, preference, location).strip().lower()
    if vote in ("", "tie"):
        raise Unusable("tie" if vote else "no preference filled in")
    if vote not in ("a", "b"):
        got = short_json(record[preference])
        raise UserError(f"{location}: {preference}: got {got}, expected a, b, tie or an empty text")
    return read_pair(columns, record, location, extra, (first, second) if vote == "a" else (second, first))


def _read_pair_columns(extra: Record, location: str) -> Record:
    """The columns of a pair, with the margin as a number. CSV has it as text, which is empty if there is none."""
    margin = extra.get("margin")
    if margin in (None, ""):
        return extra
    if isinstance(margin, str):
        with contextlib.suppress(ValueError):
            margin = float(margin)
    return extra | {"margin": read_number({"margin": margin}, "margin", location)}


def _missing_prompt_cure(record: Record, extra: Record) -> str:
    """What to write: the column that other tools give the prompt, or the only other text, or any column."""
    if isinstance(record["chosen"], str) and _is_dialogue(record["chosen"]):
        return "for dialogues written '\\n\\nHuman: ...' write hh_rlhf:PATH"
    named = [name for name in PROMPT_NAMES if isinstance(extra.get(name), str)]
    texts = [name for name, value in extra.items() if isinstance(value, str) and name not in NAMED]
    column = named[0] if named else texts[0] if len(texts) == 1 else "COLUMN"
    shape = f"prompt-{'-'.join(SIDES)}"
    return f"name the column of the prompt: files,shape={shape},prompt={column}:PATH"


def _read_sides(
    record: Record, location: str, sides: tuple[str, str] = SIDES, both_have_prompt: bool = True
) -> tuple[tuple[Message, ...], Message, Message]:
    """(messages before the responses, response of the first column, response of the second).

    both_have_prompt: whether the second column has the messages before its response too, if the first has some
    """
    (before, chosen), (before_rejected, rejected) = (read_response(record, side, location) for side in sides)
    if before != before_rejected and (both_have_prompt or before_rejected):
        raise UserError(f"{location}: {sides[0]} and {sides[1]} differ before their last message; expected one prompt")
    return before, chosen, rejected
