"""Reading the rows of a phase: each row is assigned to a share, counted, and written to a file for the tokenizer."""

import datetime
import decimal
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from json import JSONEncoder
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from data.config import DataOptions
from data.prepare.encode import Recipe, divided, read_rows
from data.prepare.mixture import Origin, origins_of_other_phases
from data.prepare.owners import PromptOwners, unusable_reason
from data.prepare.repetition import compare_sides
from data.prepare.split import PHASES, group_digest, share_of_points, text_digest
from data.read.columns import GROUP_COLUMNS, first_user_text
from data.read.records import Phase, Skipped
from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.types import Message, Row

ROWS_IN_BATCH = 1000
SHOWN_BAD_ROWS = 10
"""bad rows that an error lists"""
MAX_LOCATIONS = 100
"""dropped rows whose file and line are kept, of each reason"""
MAX_BAD_ROWS = 1000
"""rows after which reading of an origin stops if all of them are bad"""

ROWS_PER_STREAMED_ROW = 2
"""rows that are read of a stream for each training row, because some are dropped"""

ONE_GROUP_SHARE = 0.9
"""share of the rows in one group from which on the group is named as the cause of an empty split"""

MALFORMED = "malformed"
OTHER_PHASE = "of another phase's share"
HELD_OUT = "prompt held out for evaluation"
UNDECIDED = "undecided"
"""the share of a row until all rows of its prompt have been read"""
TABLE = [
    ("group", "u8"),  # digest of the group, whose rows stay in one share
    ("digest", "u8"),  # of the whole row
    ("prompt", "u8"),  # digest of the prompt, in ppo; else 0
    ("ranking", "u8"),  # digest of a pair's ranked list; 0 for other rows
    ("pair", "u8"),  # hash of a pair's prompt and sides in either order, and
    ("swapped", "?"),  # whether it has them in the other one; 0 for other rows
    ("alike", "?"),  # whether the sides of a pair differ in case and white space alone
    ("origin", "u2"),  # its index
    ("held_out", "?"),  # whether the row is for evaluation
    ("undecided", "?"),  # whether the owner of the group depends on all its rows, and on
    ("point", "u8"),  # a number of `group_digest`
]
"""what determines the use of a row"""


@dataclass
class RowCounts:
    """The outcome of every row of one origin, counted."""

    rows: int = 0
    useful: int = 0
    """rows that the phase can use, whichever phase owns them"""
    outcomes: Counter[str] = field(default_factory=Counter)
    """outcome -> rows; each row has one outcome"""
    locations: dict[str, list[str]] = field(default_factory=dict)
    """reason -> file:line of the first dropped rows"""
    bad: list[str] = field(default_factory=list)
    """error messages of malformed rows"""
    first: tuple[int, str] | None = None
    """of the first row that could be read: the digest of its group, and its first user message"""
    like_first: int = 0
    """rows with the group of the first row"""

    def add_group(self, group: int, row: Row) -> None:
        self.first = self.first or (group, first_user_text(row.prompt))
        self.like_first += group == self.first[0]

    @property
    def one_opening(self) -> str:
        """The first user message that nearly all rows share, by which they are one group; else empty."""
        count, (_, text) = self.rows, self.first or (0, "")
        return text if count > 1 and self.like_first >= ONE_GROUP_SHARE * count else ""

    def add(self, reason: str, count: int = 1) -> None:
        if count:
            self.outcomes[reason] += count

    def locate(self, reason: str, location: str) -> None:
        if location and len(self.locations.setdefault(reason, [])) < MAX_LOCATIONS:
            self.locations[reason].append(location)


@dataclass(frozen=True)
class GatheredRows:
    """The rows that may serve one phase, in a file, and for each what determines its use. Arrays [N]."""

    table: np.ndarray
    """TABLE"""
    usable: np.ndarray
    """bool, False for rows of other phases, of held-out prompts, and repeated prompts in ppo"""
    counts: list[RowCounts]
    """of each origin"""
    file: Path
    """the Arrow file of the rows: JSON and location"""

    def count(self, rows: np.ndarray, reason: str) -> None:
        """Count the rows at these positions under `reason`."""
        for origin, count in enumerate(np.bincount(self.table["origin"][rows], minlength=len(self.counts))):
            self.counts[origin].add(reason, int(count))

    def count_dropped(self, rows: np.ndarray, reason: str) -> None:
        """Count the rows at these positions under `reason`, and note where the first ones are."""
        self.count(rows, reason)
        for number, counts in enumerate(self.counts):
            for location in self.locations(rows[self.table["origin"][rows] == number]):
                counts.locate(reason, location)

    def locations(self, rows: np.ndarray) -> list[str]:
        """The file:line of the first of the rows at these positions."""
        first = np.sort(rows)[:MAX_LOCATIONS]
        return list(Dataset.from_file(str(self.file)).select(first)["location"])


def gather(
    origins: Sequence[Origin],
    options: DataOptions,
    recipe: Recipe,
    file: Path,
    template: Template,
) -> GatheredRows:
    """Read every origin to its end, or a stream as far as needed, and write the rows as JSON into an Arrow file.

    Raises: UserError if an origin cannot be read or has more malformed rows than skip_bad_rows; the error lists the
    first ten.
    """
    phase, owners = recipe.phase, PromptOwners(options, recipe, template)
    reader, counts = _Reader(options, recipe, template, owners), [RowCounts() for _ in origins]
    features = Features(row=Value("string"), location=Value("string"))
    with ArrowWriter(features=features, path=str(file), writer_batch_size=ROWS_IN_BATCH) as writer:
        entries = (reader.read(*origin) for origin in zip(range(len(origins)), origins, counts, strict=True))
        table = np.fromiter(_write(chain.from_iterable(entries), writer), TABLE)
        writer.finalize()
    rows = GatheredRows(table, np.ones(len(table), dtype=bool), counts, file)
    undecided = np.flatnonzero(table["undecided"])
    of_other_phase = np.zeros(len(table), dtype=bool)
    of_other_phase[undecided] = owners.owned_by_others(phase, table["group"][undecided], table["point"][undecided])
    _exclude(rows, of_other_phase, OTHER_PHASE)
    only = np.array([origin.use == "only" for origin in origins])[table["origin"]]
    if only.any():
        other_groups = reader.groups_of_other_phases()
        _exclude(rows, only & np.isin(table["group"], other_groups), "prompt of another phase's share")
    held_out = np.isin(table["group"], _held_out_groups(table, origins, reader))
    _exclude(rows, ~table["held_out"] & held_out, HELD_OUT)
    if phase == "ppo":
        _exclude_repeated(rows)
    return rows


def _write(rows: Iterable[tuple[str, str, tuple[int, ...]]], writer: ArrowWriter) -> Iterator[tuple[int, ...]]:
    for text, location, entry in rows:
        writer.write({"row": text, "location": location})
        yield entry


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads origins for one phase."""

    options: DataOptions
    recipe: Recipe
    template: Template
    owners: PromptOwners

    def rows(self, origin: Origin, phase: Phase) -> Iterator[Row | Skipped]:
        return read_rows(origin, phase, self.recipe, self.template)

    def read(self, number: int, origin: Origin, counts: RowCounts) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(JSON, location, entry of TABLE) of each row that the phase can use and its text gives to no other phase.

        number: of the origin. Every row is counted.
        """
        phase, seed = self.recipe.phase, self.options.data_seed
        missing = _stream_limit(origin, self.options, phase)
        for row in self._valid_rows(origin, counts):
            share, group, point = self._assign_share(row, origin, phase)
            counts.add_group(group, row)
            held_out = share == "evaluation"
            excluded = self.recipe.own_data_only and held_out and origin.use != "evaluation"
            reason = HELD_OUT if excluded else unusable_reason(row, phase)
            counts.useful += not reason
            if reason or share not in (phase, "evaluation", UNDECIDED):
                counts.add(reason or OTHER_PHASE)
                if reason:
                    counts.locate(reason, row.location)
                continue
            text = row_to_json(row, phase)
            prompt = text_digest(repr(row.prompt), seed) if phase == "ppo" else 0
            ranking = text_digest(f"{number}\0{row.ranking}", seed) if row.ranking else 0
            sides = compare_sides(row) if phase == "reward" else (0, False, False)
            digests = (group, text_digest(text, seed), prompt, ranking, *sides)
            column = self.options.group_column or GROUP_COLUMNS[0]
            stored = row_to_json(row, phase, column) if column in row.columns else text  # a group changes no order
            yield stored, row.location, (*digests, number, held_out, share == UNDECIDED, point)
            if missing is not None:
                missing[held_out] -= 1
                if max(missing.values()) <= 0:
                    break
        if not counts.rows and (origin.use == "only" or not origin.code):  # a user's own source may serve one phase
            raise UserError(f"{origin.data_path}: has no rows; expected at least one: write it again, or leave it out")
        if counts.outcomes[MALFORMED] > self.options.skip_bad_rows:
            raise UserError(_bad_rows_message(origin, counts))

    def groups_of_other_phases(self) -> np.ndarray:
        """The groups of the prompts that the other phases own in `origins_of_other_phases`.

        Raises: UserError for a stream, which cannot be read to its end. With `own_data_only` streams are left out; the
        caller warns of them.
        """
        phase, own_data_only = self.recipe.phase, self.recipe.own_data_only
        entries: list[tuple[int, int, bool]] = []
        for other_phase, origin in origins_of_other_phases(self.options, phase, own_data_only):
            if origin.streaming and own_data_only:
                continue
            if origin.streaming:
                raise UserError(
                    f"{origin.data_path}: a stream beside --{phase}-only-data-path cannot be searched "
                    "for prompts that both have; name it as a path of one phase"
                )
            for row in self.rows(origin, other_phase):
                if isinstance(row, Row):
                    share, group, point = self._assign_share(row, origin, other_phase)
                    if share in (other_phase, UNDECIDED):
                        entries.append((group, point, share == UNDECIDED))
        table = np.array(entries, [("group", "u8"), ("point", "u8"), ("undecided", "?")])
        decided, undecided = table["group"][~table["undecided"]], table[table["undecided"]]
        owned = self.owners.owned_by_others(phase, undecided["group"], undecided["point"])
        return np.concatenate([decided, undecided["group"][owned]])

    def _assign_share(self, row: Row, origin: Origin, phase: Phase) -> tuple[str, int, int]:
        """(share, group, point) of a row of `origin` in `phase`: group and point are digests of `group_digest`.

        The share is UNDECIDED if it depends on the other rows of the group.
        """
        evaluation_point, point, group = group_digest(row, self.options.data_seed)
        share = "evaluation" if origin.use == "evaluation" else share_of_points(evaluation_point, point, self.options)
        if share != "evaluation" and origin.use == "only":
            share = phase
        elif share != "evaluation" and not self.owners.follows_data_split(row):
            share = UNDECIDED
        return share, group, point

    def _valid_rows(self, origin: Origin, counts: RowCounts) -> Iterator[Row]:
        """The rows of an origin. Those that are skipped are counted."""
        rows, allowed = self.rows(origin, self.recipe.phase), self.options.skip_bad_rows
        parsed = (divided(self.template, self.recipe, row) if isinstance(row, Row) else (row,) for row in rows)
        for row in chain.from_iterable(parsed):
            counts.rows += 1
            if isinstance(row, Row):
                yield row
            elif row.bad:
                counts.add(MALFORMED)
                if len(counts.bad) < max(SHOWN_BAD_ROWS, allowed):
                    counts.bad.append(row.reason)
            else:
                counts.add(row.reason)
                counts.locate(row.reason, row.location)
            if counts.rows == MAX_BAD_ROWS == counts.outcomes[MALFORMED] > allowed:
                return  # not the expected kind of data


def _held_out_groups(table: np.ndarray, origins: Sequence[Origin], reader: _Reader) -> np.ndarray:
    """The groups of rows held out, and of all rows of evaluation origins, whichever phase they serve."""
    evaluated = [origin for origin in origins if origin.use == "evaluation" and not origin.streaming]
    rows = (row for origin in evaluated for phase in PHASES for row in reader.rows(origin, phase))
    groups = (group_digest(row, reader.options.data_seed)[2] for row in rows if isinstance(row, Row))
    return np.concatenate([table["group"][table["held_out"]], np.fromiter(groups, np.uint64)])


def _bad_rows_message(origin: Origin, row_counts: RowCounts) -> str:
    count = row_counts.outcomes[MALFORMED]
    cure = f"--skip-bad-rows {count} continues without {'it' if count == 1 else 'them'}"
    if count == row_counts.rows > 1:
        return f"{row_counts.bad[0]}; and so on: none of the first {count} rows can be read"
    if count == 1:
        return f"{row_counts.bad[0]}; {cure}"
    listed = "".join(f"\n  {message}" for message in row_counts.bad[:SHOWN_BAD_ROWS])
    heading = f"the first {SHOWN_BAD_ROWS}" if count > SHOWN_BAD_ROWS else "they are"
    return f"{origin.data_path}: {count} malformed rows of {row_counts.rows}; {cure}; {heading}:{listed}"


def _stream_limit(origin: Origin, options: DataOptions, phase: Phase) -> dict[bool, int] | None:
    """The rows that are needed of a stream, for evaluation (True) and for training (False); None: all of an origin."""
    if not origin.streaming:
        return None
    if options.max_train_rows is None:
        raise UserError(
            f"{origin.data_path}: streaming reads the first rows only; give their number: --max-train-rows N"
        )
    if origin.use == "shared" and not options.data_split[PHASES.index(phase)]:
        raise UserError(f"{origin.data_path}: --data-split gives {phase} no rows of this stream, which has no end")
    holds_out = origin.use == "evaluation" or (options.eval_fraction > 0 and not options.eval_data_path)
    return {
        True: options.max_eval_rows if holds_out else 0,
        False: 0 if origin.use == "evaluation" else ROWS_PER_STREAMED_ROW * options.max_train_rows,
    }


def _exclude_repeated(rows: GatheredRows) -> None:
    """Keep one row of every prompt: the one with the lowest digest, whatever the order of the files."""
    positions = np.flatnonzero(rows.usable)
    positions = positions[np.argsort(rows.table["digest"][positions], kind="stable")]
    _, first = np.unique(rows.table["prompt"][positions], return_index=True)
    repeated = rows.usable.copy()
    repeated[positions[first]] = False
    _exclude(rows, repeated, "repeated prompt")


def _exclude(rows: GatheredRows, excluded: np.ndarray, reason: str) -> None:
    excluded = excluded & rows.usable
    rows.count(np.flatnonzero(excluded), reason)
    rows.usable[excluded] = False


STORED_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
PAIR_COLUMNS = ("margin", "subset")
"""columns that a pair keeps beside that of its group"""


MORE = ("variables", "response_keys", "rejected_keys", "weight", "response_column")
"""fields of a row that few rows have"""
PLAIN = Row(())


def _message_to_json(message: Message) -> list[object]:
    plain: list[object] = [message.role, message.content]
    return [*plain, message.keys, message.learned] if message.keys or not message.learned else plain


def row_to_json(row: Row, phase: Phase, group_column: str = "") -> str:
    """A row as JSON, reduced to what the phase needs: only ppo keeps group and all columns, for reward functions.

    group_column: one more column that a pair keeps
    Raises: UserError for a column that JSON cannot hold.
    """
    group, columns = row.group, row.columns
    if phase != "ppo":
        group, columns = "", {k: v for k, v in columns.items() if k in (*PAIR_COLUMNS, group_column)}
        row = replace(row, response_column="") if row.response_column else row
    prompt = [_message_to_json(message) for message in row.prompt]
    more = {name: value for name in MORE if (value := getattr(row, name)) != getattr(PLAIN, name)}
    try:
        return JSON_ENCODER.encode([prompt, row.response, row.rejected, group, columns, *([more] if more else [])])
    except (TypeError, ValueError) as error:
        where = f"{row.location}: columns {', '.join(columns)}"
        raise UserError(f"{where}: {error}; expected text, numbers, lists and mappings") from None


def _encode_column(value: object) -> str | None:
    if isinstance(value, STORED_AS_TEXT):
        return str(value)
    if isinstance(value, bytes):
        return None  # pictures and the like, which a reward function over text cannot use
    raise TypeError(f"got a {type(value).__name__}")


JSON_ENCODER = JSONEncoder(default=_encode_column)


def row_from_json(text: str) -> Row:
    prompt, response, rejected, group, columns, *more = json.loads(text)
    messages = tuple(Message(*message) for message in prompt)
    return Row(messages, response, rejected, group, columns, **(more[0] if more else {}))
