"""The shapes that the columns of a record may have, and a reader for each shape.

A shape is named after the columns that it requires, such as `prompt-chosen-rejected`.
"""

import contextlib
import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from data.read.columns import as_prompt, first_user_text, read_number, read_struct, read_structs
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
from data.read.records import Record, Unusable, column_names, read_text
from data.read.table import Labelled, Parsed, Ranked, Unanswered
from rlhf.errors import UserError
from rlhf.text.messages import short_json
from rlhf.types import Message, Row

LABELS = {"true": True, "1": True, True: True, "false": False, "0": False, False: False}
"""the numbers 1 and 0, of any type, count as true and false"""

PAIR, SINGLE, NO_RESPONSE = 2, 1, 0
"""how many responses a record of a shape has; a ranked list counts as a pair"""
SIDES = ("chosen", "rejected")
NAMED = ("margin", "subset")
"""columns of a pair with a meaning of their own"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a record and their reader, `read(record, location, extra)`; `extra` becomes the row's columns."""

    columns: tuple[str, ...]
    """required columns, in the order of the shape's name"""
    responses: int
    """PAIR, SINGLE or NO_RESPONSE"""
    read: Callable[[Record, str, Record], Parsed]
    optional: tuple[str, ...]
    """columns that are used if the record has them"""

    @property
    def name(self) -> str:
        return "-".join(self.columns)


@lru_cache(maxsize=4096)
def match_shape(
    columns: tuple[str, ...], name: str | None, mapped: frozenset[str]
) -> tuple[Shape, tuple[str, ...]] | str:
    """The shape of records with these columns, and the columns that it does not use; or an error message.

    name: the shape that the user chose, or None. mapped: columns that the user renamed; the shape must use all of them.
    Shapes with a pair precede those with a single response, and these precede prompts alone. Ties go to the shape that
    requires the most columns, then to the one that uses the most.
    The error is that no shape fits, that several fit, or that a prompt has only one side of a pair beside it.
    """
    available = frozenset(columns)
    if name is None and not mapped and available.issuperset(("message_tree_id", "tree_state")):
        return f"got the columns {column_names(columns)}, those of OpenAssistant's trees; write oasst1:PATH"
    shapes = [shape for shape in SHAPES if name in (None, shape.name) and available.issuperset(shape.columns)]
    shapes = [shape for shape in shapes if mapped <= {*shape.columns, *shape.optional}]
    shapes = [shape for shape in shapes if shape.responses == max(other.responses for other in shapes)]
    shapes = [shape for shape in shapes if not any(set(shape.columns) < set(other.columns) for other in shapes)]
    used = {shape: available & {*shape.columns, *shape.optional} for shape in shapes}
    shapes = [shape for shape in shapes if not any(used[shape] < used[other] for other in shapes)]
    if not shapes:
        expected = f"those of shape={name}: {', '.join(name.split('-'))}" if name else f"one of: {_list_shapes()}"
        cure = "or map the columns: files,prompt=COLUMN,response=COLUMN:PATH"
        return f"got the columns {column_names(columns)}; expected {expected}; {cure}"
    present = available & {*SIDES}
    if name is None and len(present) == 1 and shapes[0].responses == NO_RESPONSE:
        missing = "rejected" if "chosen" in present else "chosen"
        similar = difflib.get_close_matches(missing, available - present, n=1)
        cure = f"if '{similar[0]}' is it, write files,{missing}={similar[0]}:PATH; " if similar else ""
        cure += f"if the rows are prompts only, write files,shape={shapes[0].name}:PATH"
        return f"no column '{missing}' beside '{min(present)}'; have {column_names(columns)}; {cure}"
    if len(shapes) > 1:
        names = " and ".join(shape.name for shape in shapes)
        return f"the columns fit the shapes {names}; choose one, as in files,shape={shapes[0].name}:PATH"
    return shapes[0], tuple(column for column in columns if column not in used[shapes[0]])


def _list_shapes() -> str:
    """`prompt/question, response; ...`: the shapes without a label, those that differ in the first column joined."""
    first_columns: dict[tuple[str, ...], list[str]] = {}
    for shape in SHAPES:
        if shape.columns[-1] != "label" and shape.columns != SIDES:
            first_columns.setdefault(shape.columns[1:], []).append(shape.columns[0])
    return "; ".join(", ".join(("/".join(first), *following)) for following, first in first_columns.items())


def _read_pair(
    prompt_column: str, record: Record, location: str, extra: Record, columns: tuple[str, str] = SIDES
) -> Row | Ranked:
    if any(map(_is_several, map(record.__getitem__, columns))):
        return _read_sides_of_several(prompt_column, record, location, extra, columns)
    before, chosen, rejected = _read_sides(record, location, columns)
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
    prompt_column: str, record: Record, location: str, extra: Record, columns: tuple[str, str]
) -> Ranked:
    """Several responses on one side, as in best-of-4 files: each chosen response with each rejected one."""
    responses: list[tuple[str, float]] = []
    for column, rating in zip(columns, (1.0, 0.0), strict=True):
        values = record[column] if _is_several(record[column]) else [record[column]]
        elements = {f"{column}[{i}]": value for i, value in enumerate(values)}
        texts = (Message("assistant", read_response_text(elements, name, location)) for name in elements)
        responses += [(strip_speaker(record, prompt_column, text).content, rating) for text in texts]
    prompt = read_prompt(record, prompt_column, location)
    return Ranked(prompt, tuple(responses), first_user_text(prompt), _read_pair_columns(extra, location))


def _read_pair_without_prompt(record: Record, location: str, extra: Record) -> Row:
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
                f"{_missing_prompt_cure(record)}"
            )
        prompt = with_system_message(record, (Message("user", beginning),), location)
        chosen, rejected = (replace(side, content=side.content[len(beginning) :]) for side in (chosen, rejected))
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


def _read_preferred(record: Record, location: str, extra: Record) -> Row:
    """A pair as OpenAI's preference files have it: the prompt is the messages in `input`."""
    dialogue = read_struct(record, "input", location)
    if dialogue.get("tools"):
        raise UserError(f"{location}: input: got tools inside it, expected a column tools beside prompt and responses")
    prompt = as_prompt(read_dialogue(dialogue, "messages", f"{location}: input"))
    _, chosen = read_response(record, "preferred_output", location)
    _, rejected = read_response(record, "non_preferred_output", location)
    return _pair(prompt, chosen, rejected, extra)


def _read_with_ranks(record: Record, location: str, extra: Record) -> Ranked:
    """Several responses, each with its rank, as NeMo RL's preference files have them: rank 0 is the best."""
    prompt = read_prompt(record, "context", location)
    responses = (
        (read_response_text(each, "completion", at), -read_number(each, "rank", at))
        for at, each in read_structs(record, "completions", location)
    )
    return Ranked(prompt, tuple(responses), first_user_text(prompt), extra)


def _read_voted(record: Record, location: str, extra: Record) -> Row | Ranked:
    """Two responses and a person's preference. Raises: Unusable for a tie, and if the preference is empty."""
    vote = read_optional_text(record, "preference", location).strip().lower()
    if vote in ("", "tie"):
        raise Unusable("tie" if vote else "no preference filled in")
    if vote not in ("a", "b"):
        got = short_json(record["preference"])
        raise UserError(f"{location}: preference: got {got}, expected a, b, tie or an empty text")
    columns = ("response_a", "response_b")
    return _read_pair("prompt", record, location, extra, columns if vote == "a" else columns[::-1])


def _read_pair_columns(extra: Record, location: str) -> Record:
    """The columns of a pair, with the margin as a number. CSV has it as text, which is empty if there is none."""
    margin = extra.get("margin")
    if margin in (None, ""):
        return extra
    if isinstance(margin, str):
        with contextlib.suppress(ValueError):
            margin = float(margin)
    return extra | {"margin": read_number({"margin": margin}, "margin", location)}


def _missing_prompt_cure(record: Record) -> str:
    if isinstance(record["chosen"], str) and _is_dialogue(record["chosen"]):
        return "for dialogues written '\\n\\nHuman: ...' write hh_rlhf:PATH"
    return "name the column of the prompt: files,prompt=COLUMN:PATH"


def _read_sides(
    record: Record, location: str, columns: tuple[str, str] = SIDES
) -> tuple[tuple[Message, ...], Message, Message]:
    """(messages before the responses, response of the first column, response of the second)."""
    (before, chosen), (before_rejected, rejected) = (read_response(record, column, location) for column in columns)
    if before != before_rejected:
        raise UserError(
            f"{location}: {columns[0]} and {columns[1]} differ before their last message; expected one prompt"
        )
    return before, chosen, rejected


def _read_single(prompt_column: str, column: str, record: Record, location: str, extra: Record) -> Row | Ranked:
    if column == "output" and isinstance(record[column], list):
        return _rank_by_order(read_prompt(record, prompt_column, location), record, column, location, extra)
    before, response = read_response(record, column, location)
    prompt = join_prompt(record, prompt_column, before, location)
    response = strip_speaker(record, prompt_column, response)
    keys, weight = response.keys, float(response.learned)
    return Row(prompt, response.content, None, first_user_text(prompt), extra, response_keys=keys, weight=weight)


def _read_ranked(prompt_column: str, column: str, record: Record, location: str, extra: Record) -> Ranked:
    """A list of responses: by the numbers in another column, of which one without a number is left out, or by order."""
    prompt = read_prompt(record, prompt_column, location)
    if not isinstance(record[column], list):
        got = short_json(record[column])
        raise UserError(f"{location}: {column}: got {got}, expected a list of responses")
    ranked = _rank_by_order(prompt, record, column, location, extra)
    for numbers, sign in RATINGS:
        if record.get(numbers) is not None:
            values = _read_numbers(record, numbers, location, len(ranked.responses))
            rated = zip(ranked.responses, values, strict=True)
            responses = [(text, sign * value) for (text, _), value in rated if value is not None]
            return _ranked_by_rating(prompt, responses, extra)
    return ranked


def _read_rated(prompt_column: str, record: Record, location: str, extra: Record) -> Ranked:
    """Several responses, each with its rating, as UltraFeedback has them; one without a rating is left out."""
    prompt = read_prompt(record, prompt_column, location)
    responses = []
    for at, each in read_structs(record, "completions", location):
        rating = next((name for name in ("overall_score", "score", "rating") if each.get(name) is not None), None)
        if rating is not None:
            responses.append((read_response_text(each, "response", at), read_number(each, rating, at)))
    return _ranked_by_rating(prompt, responses, extra)


def _ranked_by_rating(prompt: tuple[Message, ...], responses: Sequence[tuple[str, float]], extra: Record) -> Ranked:
    if not responses:
        raise Unusable("no response with a rating")
    return Ranked(prompt, tuple(responses), first_user_text(prompt), extra)


def _rank_by_order(prompt: tuple[Message, ...], record: Record, column: str, location: str, extra: Record) -> Ranked:
    """The responses in a column, the best one first."""
    values = {f"{column}[{i}]": value for i, value in enumerate(record[column])}
    if not values:
        raise Unusable("no response")
    responses = tuple((read_response_text(values, name, location), -float(i)) for i, name in enumerate(values))
    return Ranked(prompt, responses, first_user_text(prompt), extra)


def _read_numbers(record: Record, column: str, location: str, count: int) -> list[float | None]:
    values = record[column]
    if not isinstance(values, list) or len(values) != count:
        expected = f"{count} numbers, one for each response"
        raise UserError(f"{location}: {column}: got {short_json(values)}, expected {expected}")
    elements = {f"{column}[{i}]": value for i, value in enumerate(values)}
    return [None if value is None else read_number(elements, name, location) for name, value in elements.items()]


def _read_labelled(shape: Shape, record: Record, location: str, extra: Record) -> Labelled:
    row = shape.read(record, location, extra)
    if not isinstance(row, Row) or row.response is None:
        raise UserError(f"{location}: got a label but no single response, expected one response that is good or bad")
    if row.response_keys or not row.weight:
        raise UserError(f"{location}: got keys beside the response's content and a label, expected a pair or no label")
    label = record["label"]
    key = label.lower() if isinstance(label, str) else label
    good = LABELS.get(key) if isinstance(key, str | int | float) else None
    if good is None:
        cure = f"if the column has another meaning, write files,shape={shape.name}:PATH"
        got = short_json(label)
        raise UserError(f"{location}: label: got {got}, expected true or false (good or bad); {cure}")
    return Labelled(row.prompt, row.response, good, row.group, row.columns)


def _read_conversation(column: str, record: Record, location: str, extra: Record) -> Row | Unanswered:
    turns = with_system_message(record, read_dialogue(record, column, location), location)
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


def _read_plain_text(record: Record, location: str, extra: Record) -> Row:
    return Row((), read_text(record, "text", location), None, "", extra)


def _read_prompt_only(record: Record, location: str, extra: Record) -> Row:
    prompt = read_prompt(record, "prompt", location)
    return Row(prompt, None, None, first_user_text(prompt), extra)


SYSTEM_COLUMN = ("system",)
INSTRUCTION_COLUMNS = ("system", "input", "context", "history")
"""optional columns of an instruction"""

RANKED_PROMPTS = (("prompt", SYSTEM_COLUMN), ("instruction", INSTRUCTION_COLUMNS), ("question", SYSTEM_COLUMN))
"""columns of the prompt of a ranked list, each with its optional columns"""
RATINGS = (("scores", 1), ("ratings", 1), ("ranks", -1))
"""columns that order the responses of a list, and their sign: the highest is the best, or the lowest"""

SINGLES = (
    *(
        Shape((column, response), SINGLE, partial(_read_single, column, response), optional)
        for column, response, optional in (
            ("prompt", "completion", SYSTEM_COLUMN),
            ("prompt", "response", SYSTEM_COLUMN),
            ("instruction", "output", INSTRUCTION_COLUMNS),
            ("instruction", "response", INSTRUCTION_COLUMNS),
            ("question", "answer", SYSTEM_COLUMN),
            ("question", "response", SYSTEM_COLUMN),
        )
    ),
    *(
        Shape((column,), SINGLE, partial(_read_conversation, column), SYSTEM_COLUMN)
        for column in ("messages", "conversations")
    ),
)
SHAPES = (
    *(
        Shape((column, *SIDES), PAIR, partial(_read_pair, column), optional)
        for column, optional in (
            ("prompt", SYSTEM_COLUMN),
            ("instruction", INSTRUCTION_COLUMNS),
            ("question", SYSTEM_COLUMN),
            ("conversations", SYSTEM_COLUMN),
            ("context", SYSTEM_COLUMN),
        )
    ),
    Shape(SIDES, PAIR, _read_pair_without_prompt, ("system", "messages")),
    Shape(("input", "preferred_output", "non_preferred_output"), PAIR, _read_preferred, ()),
    Shape(("context", "completions"), PAIR, _read_with_ranks, SYSTEM_COLUMN),
    Shape(("prompt", "response_a", "response_b", "preference"), PAIR, _read_voted, SYSTEM_COLUMN),
    *(
        Shape((column, responses), PAIR, partial(_read_ranked, column, responses), (*optional, *dict(RATINGS)))
        for column, optional in RANKED_PROMPTS
        for responses in ("responses", "generations")  # distilabel's
    ),
    *(
        Shape((column, "completions"), PAIR, partial(_read_rated, column), optional)
        for column, optional in RANKED_PROMPTS
    ),
    *SINGLES,
    *(Shape((*shape.columns, "label"), SINGLE, partial(_read_labelled, shape), shape.optional) for shape in SINGLES),
    Shape(("text",), NO_RESPONSE, _read_plain_text, ()),
    Shape(("prompt",), NO_RESPONSE, _read_prompt_only, SYSTEM_COLUMN),
)
