"""Any local file or hub dataset whose columns have one of the usual shapes.

`place` is a .json, .jsonl, .ndjson, .csv, .tsv, .parquet or .txt file (.gz too), a pattern such as 'data/*.jsonl', a
directory of such files or one that `datasets` saved, or OWNER/NAME[@REVISION] on the hub. The shape is seen from the
names of the columns; `shape` says it where two fit, and `prompt=question,response=reply` where names are others.
Columns beyond the shape go with the row, for reward functions: `files,shape=prompt,prompt=question:PLACE` leaves the
answer to them.
"""

from dataclasses import dataclass
from functools import partial

from pydantic import field_validator

from data.read.places import TableConfig, open_place
from data.read.records import Record, names
from data.read.shapes import SHAPES, fit
from data.read.table import Parsed, Table
from rlhf.config import suggest
from rlhf.errors import UserError

HUB_IDS = ()


class Config(TableConfig):
    """Which part of the dataset, and which of its columns is what."""

    shape: str | None = None
    """the columns that count, where more than one shape fits: prompt-response, messages, chosen-rejected, ..."""
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
    response_a: str | None = None
    """column of one response of two"""
    response_b: str | None = None
    """column of the other"""
    preference: str | None = None
    """column of the one that a person prefers: a, b or tie; empty until it is filled in"""
    responses: str | None = None
    """column of the list of responses, the best one first unless there are scores or ranks"""
    scores: str | None = None
    """column of the list of their scores, higher is better"""
    ranks: str | None = None
    """column of the list of their ranks, lower is better"""
    label: str | None = None
    """column that says whether the response is good: true or false"""
    messages: str | None = None
    """column of the whole dialogue"""
    conversations: str | None = None
    """column of the whole dialogue, by another name"""
    context: str | None = None
    """column of the dialogue before the chosen and the rejected response, or of what an instruction speaks of"""
    text: str | None = None
    """column of text without a prompt"""
    instruction: str | None = None
    """column of the instruction"""
    input: str | None = None
    """column of what the instruction is about"""
    output: str | None = None
    """column of the response to an instruction, or of several, the best one first"""
    history: str | None = None
    """column of the pairs [said, replied] before an instruction"""
    question: str | None = None
    """column of the question"""
    answer: str | None = None
    """column of the answer to it"""
    system: str | None = None
    """column of the system message"""

    @field_validator("shape")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        known = [shape.name for shape in SHAPES]
        if name not in (None, *known):
            raise ValueError(f"no shape '{name}'{suggest(str(name), known)}; have {', '.join(known)}")
        return name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user said of the columns."""

    shape: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    """(what it is, the column's name)"""
    mapped: frozenset[str] = frozenset()


NOTHING_SAID = Wanted()


def build(config: Config, place: str) -> Table:
    return Table(open_place(place), config, partial(parse, wanted=wanted_of(config)))


def wanted_of(config: Config) -> Wanted:
    columns = [name for name in Config.model_fields if name not in (*TableConfig.model_fields, "shape")]
    renamed = tuple((name, column) for name in columns if (column := getattr(config, name)) is not None)
    return Wanted(config.shape, renamed, frozenset(name for name, _ in renamed))


def parse(record: Record, where: str, wanted: Wanted = NOTHING_SAID) -> Parsed:
    """What a record holds, by the one shape whose columns it has.

    Raises: UserError naming the columns found, where no shape fits or two do, or a column holds something else;
    Unusable for what has nothing to train on.
    """
    if wanted.renamed:
        record = _rename(record, where, wanted)
    found = fit(tuple(record), wanted.shape, wanted.mapped)
    if isinstance(found, str):
        raise UserError(f"{where}: {found}")
    return found.shape.read(record, where, {column: record[column] for column in found.rest})


def _rename(record: Record, where: str, wanted: Wanted) -> Record:
    for name, column in wanted.renamed:
        if column not in record:
            near = suggest(column, list(record))
            raise UserError(f"{where}: no column '{column}' ({name}={column}){near}; have {names(record)}")
    gone = {*wanted.mapped, *(column for _, column in wanted.renamed)}
    kept = {name: value for name, value in record.items() if name not in gone}
    return {name: record[column] for name, column in wanted.renamed} | kept
