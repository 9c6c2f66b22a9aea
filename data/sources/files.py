"""Any local file or hub dataset whose columns have one of the usual shapes.

`path` is a .json, .jsonl, .ndjson, .csv, .tsv, .parquet or .txt file (.gz too), a pattern such as 'data/*.jsonl', a
directory of such files or one that `datasets` saved, the URL of such files in an object store or on a web server, or
OWNER/NAME[@REVISION] on the hub. The names of the columns determine the shape. `shape` chooses one if two fit;
`prompt=question,response=reply` maps other names. Columns that the shape does not use become columns of the row, for
reward functions: with `files,shape=prompt,prompt=question:PATH` the answers go there.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from pydantic import Field, field_validator

from data.read.paths import TableConfig, open_path
from data.read.records import Record, column_names
from data.read.shapes import PAIR, SHAPES, SINGLE, Shape, match_shape
from data.read.table import Parsed, Table, Unanswered
from data.sources._table import DATASETS
from rlhf.config import suggest
from rlhf.errors import UserError
from rlhf.text.messages import KWARGS, row_variables
from rlhf.types import Row

HUB_IDS = ()
NOTHING: Mapping[str, str] = MappingProxyType({})
KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"oasst1": ("message_tree_id", "tree_state"), **{data.name: data.columns for data in DATASETS if data.columns}}
)
"""sources of published datasets, and the columns by which a record is known as theirs"""


class Config(TableConfig):
    """Which part of the dataset, and the meaning of its columns."""

    shape: str | None = None
    """the columns to use, if more than one shape fits: prompt-response, messages, chosen-rejected, ..."""
    prompt: str | None = None
    """column of the prompt: text or messages"""
    response: str | None = None
    """column of the response"""
    completion: str | None = None
    """column of the response, by another name"""
    chosen: str | None = None
    """column of the better response"""
    rejected: str | None = None
    """column of the worse response"""
    rejected_response: str | None = Field(None, repr=False)
    """column of the worse response, beside a dialogue that ends in the better one"""
    rejected_messages: str | None = Field(None, repr=False)
    """column of the dialogue that ends in the worse response, beside such a dialogue"""
    response_a: str | None = None
    """column of the first of two responses"""
    response_b: str | None = None
    """column of the second of two responses"""
    preference: str | None = None
    """column of the response that a person prefers: a, b or tie; empty until it is filled in"""
    responses: str | None = None
    """column of the list of responses, the best one first unless there are scores or ranks"""
    scores: str | None = None
    """column of the list of their scores, higher is better"""
    ranks: str | None = None
    """column of the list of their ranks, lower is better"""
    preferred_output: str | None = Field(None, repr=False)
    """column of the better response beside an `input` of messages"""
    non_preferred_output: str | None = Field(None, repr=False)
    """column of the worse response beside it"""
    completions: str | None = Field(None, repr=False)
    """column of the list of {rank, completion}, rank 0 the best, or of {response, score}, the highest the best"""
    generations: str | None = Field(None, repr=False)
    """column of the list of responses, by another name"""
    ratings: str | None = Field(None, repr=False)
    """column of the list of their scores, by another name"""
    label: str | None = None
    """column of whether the response is good: true or false"""
    messages: str | None = None
    """column of the whole dialogue"""
    conversations: str | None = None
    """column of the whole dialogue, by another name"""
    context: str | None = None
    """column of the dialogue before the chosen and the rejected response, or of the context of an instruction"""
    text: str | None = None
    """column of text without a prompt"""
    instruction: str | None = None
    """column of the instruction"""
    input: str | None = None
    """column of the input to the instruction"""
    output: str | None = None
    """column of the response to an instruction, or of several, the best one first"""
    history: str | None = None
    """column of the pairs [user, assistant] before an instruction"""
    question: str | None = None
    """column of the question"""
    answer: str | None = None
    """column of the answer to it"""
    system: str | None = None
    """column of the system message"""

    @field_validator("shape")
    @classmethod
    def _known(cls, shape: str | None) -> str | None:
        names = [candidate.name for candidate in SHAPES]
        if shape not in (None, *names):
            raise ValueError(f"no shape '{shape}'{suggest(str(shape), names)}; have {', '.join(names)}")
        return shape


def build(config: Config, path: str) -> Table:
    columns = [name for name in Config.model_fields if name not in (*TableConfig.model_fields, "shape")]
    renamed = {name: column for name in columns if (column := getattr(config, name)) is not None}
    return Table(open_path(path), config, partial(parse, shape=config.shape, renamed=renamed))


def parse(record: Record, location: str, shape: str | None = None, renamed: Mapping[str, str] = NOTHING) -> Parsed:
    """Parse a record by the shape that its columns have, or by the one named `shape`.

    renamed: name in the shapes -> the record's name, of the columns that the user mapped
    Raises: UserError if no shape fits, several fit, or a column has another type; Unusable for a valid record that
    cannot be trained on.
    """
    if renamed:
        record = _rename(record, location, renamed)
    match = _match(tuple(record), shape, frozenset(renamed))
    if isinstance(match, str):
        raise UserError(f"{location}: {match}")
    matched, unused = match
    extra = {column: record[column] for column in unused}
    variables, weight = row_variables(extra, location)
    row = matched.format.read(matched.columns, record, location, extra)
    common: dict[str, Any] = {"variables": variables, "location": location}
    if isinstance(row, Unanswered):
        return Unanswered(*(replace(part, **common, weight=weight) for part in (row.whole, row.answered)))
    if not isinstance(row, Row):
        if variables or weight != 1:
            raise UserError(
                f"{location}: got tools, {KWARGS} or a weight, expected them only beside one response or a pair"
            )
        return row
    if matched.responses == SINGLE and row.response is not None and len(matched.columns) > 1:
        common["response_column"] = renamed.get(matched.columns[1], matched.columns[1])
    return replace(row, **common, weight=weight * row.weight)


@lru_cache(maxsize=4096)
def _match(columns: tuple[str, ...], shape: str | None, mapped: frozenset[str]) -> tuple[Shape, tuple[str, ...]] | str:
    """`match_shape`; the columns of a dataset with a source of its own are an error, because that source reads more."""
    match = match_shape(columns, shape, mapped)
    source = next((name for name, known in KNOWN.items() if {*known} <= {*columns}), None)
    fits = None if isinstance(match, str) else match[0]
    if source is None or shape is not None or mapped or (fits and fits.responses == PAIR):
        return match
    as_is = f", or to read them as they are files,shape={fits.name}:PATH" if fits else ""
    return f"got the columns {column_names(columns)}, those of a published dataset; write {source}:PATH{as_is}"


def _rename(record: Record, location: str, renamed: Mapping[str, str]) -> Record:
    for name, column in renamed.items():
        if column not in record:
            suggestion = suggest(column, list(record))
            raise UserError(
                f"{location}: no column '{column}' ({name}={column}){suggestion}; have {column_names(record)}"
            )
    unchanged = {name: value for name, value in record.items() if name not in {*renamed, *renamed.values()}}
    return {name: record[column] for name, column in renamed.items()} | unchanged
