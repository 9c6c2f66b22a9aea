"""The shapes that the columns of a record may have, and what a record of each shape holds.

A shape is named for the columns it needs, such as `prompt-chosen-rejected`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from data.read.columns import before_response, number, opening
from data.read.dialogues import after_system, joined, messages, optional, prompt_in, reply, response_in
from data.read.records import Record, Unusable, names, shown, text
from data.read.table import Labelled, Parsed, Ranked
from rlhf.errors import UserError
from rlhf.types import Message, Row

LABELS = {"true": True, "1": True, True: True, "false": False, "0": False, False: False}
"""1 and 0, of any type of number, are True and False"""

PAIR, ONE, LITTLE = 3, 2, 1
"""how much a record of a shape holds: responses to choose from, a response, less"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What `read(record, where, rest)` needs; `rest` becomes the columns of the row."""

    columns: tuple[str, ...]
    """that must be there"""
    holds: int
    read: Callable[[Record, str, dict[str, Any]], Parsed]
    also: tuple[str, ...]
    """that are taken in where they are there"""

    @property
    def name(self) -> str:
        return "-".join(self.columns)

    def takes(self, have: frozenset[str]) -> frozenset[str]:
        """The columns that it reads of those there are."""
        return have & {*self.columns, *self.also}


@dataclass(frozen=True, slots=True)
class Fit:
    """The shape of a record, and which of its columns are left over."""

    shape: Shape
    rest: tuple[str, ...]


@lru_cache(maxsize=4096)
def fit(columns: tuple[str, ...], name: str | None, mapped: frozenset[str]) -> Fit | str:
    """The shape of records with these columns: the one called `name`, else the one that fits and takes all `mapped`.

    A pair before a single response before a prompt alone; of those the one that needs, or takes in, all that another
    does and more.
    If none fits, or several, or a prompt that has only one side of a pair beside it, what is wrong.
    """
    have = frozenset(columns)
    fits = [shape for shape in SHAPES if name in (None, shape.name) and have.issuperset(shape.columns)]
    fits = [shape for shape in fits if mapped <= {*shape.columns, *shape.also}]
    fits = [shape for shape in fits if shape.holds == max(other.holds for other in fits)]
    fits = [shape for shape in fits if not any(set(shape.columns) < set(other.columns) for other in fits)]
    fits = [shape for shape in fits if not any(shape.takes(have) < other.takes(have) for other in fits)]
    if not fits:
        wanted = f"those of shape={name}: {', '.join(name.split('-'))}" if name else f"one of: {_known()}"
        cure = "or say which is which: files,prompt=COLUMN,response=COLUMN:PLACE"
        return f"got the columns {names(columns)}; expected {wanted}; {cure}"
    half = have & {"chosen", "rejected"}
    if name is None and len(half) == 1 and fits[0].holds == LITTLE:
        other = "rejected" if "chosen" in half else "chosen"
        cure = f"where it is meant so, write files,shape={fits[0].name}:PLACE"
        return f"no column '{other}' beside '{min(half)}'; have {names(columns)}; {cure}"
    if len(fits) > 1:
        which = " and ".join(shape.name for shape in fits)
        return f"the columns fit {which}; say which, as in files,shape={fits[0].name}:PLACE"
    return Fit(fits[0], tuple(column for column in columns if column not in fits[0].takes(have)))


def _known() -> str:
    """`prompt/question, response; ...`: the shapes without a label, those that differ in the first column together."""
    heads: dict[tuple[str, ...], list[str]] = {}
    for shape in SHAPES:
        if shape.columns[-1] != "label" and shape.columns != ("chosen", "rejected"):
            heads.setdefault(shape.columns[1:], []).append(shape.columns[0])
    return "; ".join(", ".join(("/".join(first), *others)) for others, first in heads.items())


SIDES = ("chosen", "rejected")


def _pair(
    prompt_column: str, record: Record, where: str, rest: dict[str, Any], columns: tuple[str, str] = SIDES
) -> Row:
    before, chosen, rejected = _sides(record, where, columns)
    prompt = joined(record, prompt_column, before, where)
    chosen, rejected = (reply(record, prompt_column, response) for response in (chosen, rejected))
    return Row(prompt, chosen, rejected, opening(prompt), _with_margin(rest, where))


def _pair_alone(record: Record, where: str, rest: dict[str, Any]) -> Row:
    """Two dialogues that begin alike, or two responses to `messages`."""
    before, chosen, rejected = _sides(record, where)
    if before:
        prompt = after_system(record, before_response(before), where)
    elif "messages" in record:
        prompt = prompt_in(record, "messages", where)
    else:
        raise UserError(
            f"{where}: chosen: got no prompt before it, and there is no column 'prompt'; {_no_prompt(record)}"
        )
    return Row(prompt, chosen, rejected, opening(prompt), _with_margin(rest, where))


def _voted(record: Record, where: str, rest: dict[str, Any]) -> Row:
    """Two responses and the one that a person prefers; Unusable until that is filled in."""
    vote = optional(record, "preference", where).strip().lower()
    if vote in ("", "tie"):
        raise Unusable("tie" if vote else "no preference filled in")
    if vote not in ("a", "b"):
        raise UserError(f"{where}: preference: got {shown(record['preference'])}, expected a, b, tie or nothing yet")
    both = ("response_a", "response_b")
    return _pair("prompt", record, where, rest, both if vote == "a" else both[::-1])


def _with_margin(rest: dict[str, Any], where: str) -> dict[str, Any]:
    """The columns of a pair, the margin among them a number; in CSV it is text, and empty where there is none."""
    margin = rest.get("margin")
    if margin in (None, ""):
        return rest
    if isinstance(margin, str):
        with contextlib.suppress(ValueError):
            margin = float(margin)
    return rest | {"margin": number({"margin": margin}, "margin", where)}


def _no_prompt(record: Record) -> str:
    if isinstance(record["chosen"], str) and record["chosen"].lstrip().startswith("Human:"):
        return "dialogues written '\\n\\nHuman: ...' are read by hh_rlhf:PLACE"
    return "say where the prompt is: files,prompt=COLUMN:PLACE"


def _sides(record: Record, where: str, columns: tuple[str, str] = SIDES) -> tuple[tuple[Message, ...], str, str]:
    """(messages before the responses, the better response, the worse one)."""
    (before, chosen), (other, rejected) = (response_in(record, column, where) for column in columns)
    if before != other:
        raise UserError(f"{where}: {columns[0]} and {columns[1]} differ before their last message; expected one prompt")
    return before, chosen, rejected


def _single(prompt_column: str, column: str, record: Record, where: str, rest: dict[str, Any]) -> Row | Ranked:
    if column == "output" and isinstance(record[column], list):
        return _best_first(prompt_in(record, prompt_column, where), record, column, where, rest)
    before, response = response_in(record, column, where)
    prompt = joined(record, prompt_column, before, where)
    return Row(prompt, reply(record, prompt_column, response), None, opening(prompt), rest)


def _ranked(prompt_column: str, record: Record, where: str, rest: dict[str, Any]) -> Ranked:
    prompt = prompt_in(record, prompt_column, where)
    if not isinstance(record["responses"], list):
        raise UserError(f"{where}: responses: got {shown(record['responses'])}, expected a list of responses")
    ranked = _best_first(prompt, record, "responses", where, rest)
    for column, sign in (("scores", 1), ("ranks", -1)):
        if record.get(column) is not None:
            worths = _numbers(record, column, where, len(ranked.responses))
            responses = [(words, sign * worth) for (words, _), worth in zip(ranked.responses, worths, strict=True)]
            return Ranked(prompt, tuple(responses), ranked.group, rest)
    return ranked


def _best_first(prompt: tuple[Message, ...], record: Record, column: str, where: str, rest: dict[str, Any]) -> Ranked:
    values = {f"{column}[{i}]": value for i, value in enumerate(record[column])}
    if not values:
        raise Unusable("no response")
    responses = tuple((response_in(values, name, where)[1], -float(i)) for i, name in enumerate(values))
    return Ranked(prompt, responses, opening(prompt), rest)


def _numbers(record: Record, column: str, where: str, count: int) -> list[float]:
    values = record[column]
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"{where}: {column}: got {shown(values)}, expected {count} numbers, one for each response")
    named = {f"{column}[{i}]": value for i, value in enumerate(values)}
    return [number(named, name, where) for name in named]


def _labelled(shape: Shape, record: Record, where: str, rest: dict[str, Any]) -> Labelled:
    row = shape.read(record, where, rest)
    if not isinstance(row, Row) or row.response is None:
        raise UserError(f"{where}: got a label but no single response, expected one response that is good or bad")
    label = record["label"]
    word = label.lower() if isinstance(label, str) else label
    good = LABELS.get(word) if isinstance(word, str | int | float) else None
    if good is None:
        cure = f"if it says something else, write files,shape={shape.name}:PLACE"
        raise UserError(f"{where}: label: got {shown(label)}, expected true or false (good or bad); {cure}")
    return Labelled(row.prompt, row.response, good, row.group, row.columns)


def _conversation(column: str, record: Record, where: str, rest: dict[str, Any]) -> Row:
    turns = after_system(record, messages(record, column, where), where)
    if turns[-1].role == "assistant":
        return Row(turns[:-1], turns[-1].content, None, opening(turns), rest)
    return Row(before_response(turns), None, None, opening(turns), rest)


def _text(record: Record, where: str, rest: dict[str, Any]) -> Row:
    return Row((), text(record, "text", where), None, "", rest)


def _prompt(record: Record, where: str, rest: dict[str, Any]) -> Row:
    prompt = prompt_in(record, "prompt", where)
    return Row(prompt, None, None, opening(prompt), rest)


SYSTEM = ("system",)
INSTRUCTION = ("system", "input", "context", "history")
"""what goes with an instruction"""

PAIRS = tuple(
    Shape((column, "chosen", "rejected"), PAIR, partial(_pair, column), also)
    for column, also in (
        ("prompt", SYSTEM),
        ("instruction", INSTRUCTION),
        ("question", SYSTEM),
        ("conversations", SYSTEM),
        ("context", SYSTEM),
    )
)
RANKED = tuple(
    Shape((column, "responses"), PAIR, partial(_ranked, column), (*also, "scores", "ranks"))
    for column, also in (("prompt", SYSTEM), ("instruction", INSTRUCTION), ("question", SYSTEM))
)
SINGLES = (
    *(
        Shape((column, response), ONE, partial(_single, column, response), also)
        for column, response, also in (
            ("prompt", "completion", SYSTEM),
            ("prompt", "response", SYSTEM),
            ("instruction", "output", INSTRUCTION),
            ("instruction", "response", INSTRUCTION),
            ("question", "answer", SYSTEM),
            ("question", "response", SYSTEM),
        )
    ),
    *(Shape((column,), ONE, partial(_conversation, column), SYSTEM) for column in ("messages", "conversations")),
)
SHAPES = (
    *PAIRS,
    Shape(("chosen", "rejected"), PAIR, _pair_alone, ("system", "messages")),
    Shape(("prompt", "response_a", "response_b", "preference"), PAIR, _voted, SYSTEM),
    *RANKED,
    *SINGLES,
    *(Shape((*shape.columns, "label"), ONE, partial(_labelled, shape), shape.also) for shape in SINGLES),
    Shape(("text",), LITTLE, _text, ()),
    Shape(("prompt",), LITTLE, _prompt, SYSTEM),
)
