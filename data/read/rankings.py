"""Readers of several responses to one prompt, which numbers or their order rank.

A reader gets the columns of its shape, the record, its location, and the columns that the shape does not use.
"""

from collections.abc import Sequence

from data.read.columns import first_user_text, read_number, read_structs
from data.read.dialogues import read_prompt, read_response_text
from data.read.records import Record, Unusable
from data.read.table import Ranked
from rlhf.errors import UserError
from rlhf.text.messages import short_json
from rlhf.types import Message

RATINGS = (("scores", 1), ("ratings", 1), ("ranks", -1))
"""columns that order the responses of a list, and their sign: the highest is the best, or the lowest"""


def read_ranked(columns: Sequence[str], record: Record, location: str, extra: Record) -> Ranked:
    """A list of responses: by the numbers in another column, of which one without a number is left out, or by order."""
    prompt_column, column = columns
    prompt = read_prompt(record, prompt_column, location)
    if not isinstance(record[column], list):
        got = short_json(record[column])
        raise UserError(f"{location}: {column}: got {got}, expected a list of responses")
    ranked = rank_by_order(prompt, record, column, location, extra)
    for numbers, sign in RATINGS:
        if record.get(numbers) is not None:
            values = _read_numbers(record, numbers, location, len(ranked.responses))
            rated = zip(ranked.responses, values, strict=True)
            responses = [(text, sign * value) for (text, _), value in rated if value is not None]
            return _ranked_by_rating(prompt, responses, extra)
    return ranked


def read_rated(columns: Sequence[str], record: Record, location: str, extra: Record) -> Ranked:
    """Several responses, each with its rating, as UltraFeedback has them; one without a rating is left out."""
    prompt_column, column = columns
    prompt = read_prompt(record, prompt_column, location)
    responses = []
    for at, each in read_structs(record, column, location):
        rating = next((name for name in ("overall_score", "score", "rating") if each.get(name) is not None), None)
        if rating is not None:
            responses.append((read_response_text(each, "response", at), read_number(each, rating, at)))
    return _ranked_by_rating(prompt, responses, extra)


def read_with_ranks(columns: Sequence[str], record: Record, location: str, extra: Record) -> Ranked:
    """Several responses, each with its rank, as NeMo RL's preference files have them: rank 0 is the best."""
    prompt_column, column = columns
    prompt = read_prompt(record, prompt_column, location)
    responses = (
        (read_response_text(each, "completion", at), -read_number(each, "rank", at))
        for at, each in read_structs(record, column, location)
    )
    return Ranked(prompt, tuple(responses), first_user_text(prompt), extra)


def _ranked_by_rating(prompt: tuple[Message, ...], responses: Sequence[tuple[str, float]], extra: Record) -> Ranked:
    if not responses:
        raise Unusable("no response with a rating")
    return Ranked(prompt, tuple(responses), first_user_text(prompt), extra)


def rank_by_order(prompt: tuple[Message, ...], record: Record, column: str, location: str, extra: Record) -> Ranked:
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
