"""Rows are read once, divided by content, and written down for the tokenizer; every row is accounted for."""

import datetime
import decimal
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONEncoder
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from data.build.mixture import Origin, places_of_others
from data.build.owners import Owners, useless
from data.build.split import PHASES, group_digest, share_at, text_digest
from data.config import DataOptions
from data.read.records import Phase
from rlhf.errors import UserError
from rlhf.types import Message, Row

ROWS_IN_BATCH = 1000
SHOWN = 10
"""bad rows that an error lists"""
ALL_BAD = 1000
"""rows after which a place that has only bad ones is read no further"""

SPARE = 2
"""rows of a stream that are read for each that is wanted for training, as some are dropped"""

MALFORMED = "malformed"
ELSEWHERE = "of another phase's share"
HELD_OUT = "prompt held out for evaluation"
UNDECIDED = "undecided"
"""the share of a row until all rows of its prompt are read"""


@dataclass
class Ledger:
    """What became of every row of one origin."""

    rows: int = 0
    useful: int = 0
    """rows that the phase has a use for, whichever phase owns them"""
    fates: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.fates[reason] += count


@dataclass(frozen=True)
class Gathered:
    """The rows that may serve one phase, in a file, and of each what decides on it. Arrays [N]."""

    file: Path
    groups: np.ndarray
    """uint64 digest of what keeps rows together"""
    digests: np.ndarray
    """uint64 digest of the whole row"""
    origins: np.ndarray
    """uint16 number of the origin"""
    held_out: np.ndarray
    """bool, for evaluation"""
    usable: np.ndarray
    """bool, not a repetition of a prompt that must not come again"""
    rankings: np.ndarray
    """uint64 digest of the ranked list that a pair is of, 0 of other rows"""
    ledgers: list[Ledger]

    def count(self, rows: np.ndarray, reason: str) -> None:
        """Count the rows at these positions under `reason`."""
        for origin, count in enumerate(np.bincount(self.origins[rows], minlength=len(self.ledgers))):
            self.ledgers[origin].drop(reason, int(count))


def gather(
    origins: Sequence[Origin], options: DataOptions, phase: Phase, file: Path, own_places: bool = False
) -> Gathered:
    """Read every origin to its end, or as far as is needed where it streams. `own_places`: see `Recipe`.

    Raises: UserError if a place cannot be read or has more malformed rows than skip_bad_rows; the error lists the
    first ten.
    """
    found, owners = _Columns(), Owners(options)
    ledgers = [Ledger() for _ in origins]
    with Writer(file) as writer:
        for number, (origin, ledger) in enumerate(zip(origins, ledgers, strict=True)):
            needs = Needs(origin, options, phase)
            for row in _sound_rows(origin, phase, options, ledger):
                share, group, point = _placed(row, origin, phase, options, owners)
                spare = own_places and share == "evaluation" and origin.use != "evaluation"
                reason = HELD_OUT if spare else useless(row, phase)
                ledger.useful += not reason
                if reason or share not in (phase, "evaluation", UNDECIDED):
                    ledger.drop(reason or ELSEWHERE)
                    continue
                text = to_text(row, phase)
                writer.write(text)
                whole = text_digest(text, options.data_seed)
                prompt = text_digest(repr(row.prompt), options.data_seed) if phase == "ppo" else 0
                ranking = text_digest(f"{number}\0{row.ranking}", options.data_seed) if row.ranking else 0
                if share == UNDECIDED:
                    found.undecided.append(len(found.groups))
                    found.points.append(point)
                found.add(group, whole, prompt, number, share == "evaluation", ranking)
                if needs.are_met(share):
                    break
            if ledger.fates[MALFORMED] > options.skip_bad_rows:
                raise UserError(_refusal(origin, ledger))
    rows = found.gathered(file, ledgers)
    undecided = _numpy(found.undecided)
    others = np.zeros(len(rows.groups), dtype=bool)
    others[undecided] = owners.others(phase, rows.groups[undecided], _numpy(found.points))
    _exclude(rows, others, ELSEWHERE)
    only = np.array([origin.use == "only" for origin in origins])[rows.origins]
    if only.any():
        elsewhere = np.isin(rows.groups, _groups_elsewhere(phase, options, own_places, owners))
        _exclude(rows, only & elsewhere, "prompt of another phase's share")
    _exclude(rows, ~rows.held_out & np.isin(rows.groups, _groups_held_out(rows, origins, options)), HELD_OUT)
    if phase == "ppo":
        _exclude_repeated(rows, _numpy(found.prompts))
    return rows


def _groups_held_out(rows: Gathered, origins: Sequence[Origin], options: DataOptions) -> np.ndarray:
    """Of the rows to evaluate on, and of whatever places for evaluation hold for other phases."""
    groups = array("Q")
    for origin in origins:
        if origin.use == "evaluation" and not origin.streaming:
            for phase in PHASES:
                found = (row for row in origin.rows(phase) if isinstance(row, Row))
                groups.extend(group_digest(row, options.data_seed)[2] for row in found)
    return np.concatenate([rows.groups[rows.held_out], _numpy(groups).astype(np.uint64)])


def _groups_elsewhere(phase: Phase, options: DataOptions, own_places: bool, owners: Owners) -> np.ndarray:
    """Of the prompts that the other phases have in `places_of_others`.

    Raises: UserError if one is a stream, which cannot be looked through. With `own_places` it is left out: the caller
    tells of it.
    """
    groups, undecided, points = array("Q"), array("Q"), array("Q")
    for other, origin in places_of_others(options, phase, own_places):
        if origin.streaming and own_places:
            continue
        if origin.streaming:
            raise UserError(
                f"{origin.location}: a stream beside --{phase}-only-data-path cannot be looked through "
                "for prompts that both have; name it as a place of one phase"
            )
        for row in origin.rows(other):
            if isinstance(row, Row):
                share, group, point = _placed(row, origin, other, options, owners)
                if share == other:
                    groups.append(group)
                elif share == UNDECIDED:
                    undecided.append(group)
                    points.append(point)
    open_ones = _numpy(undecided)
    return np.concatenate([_numpy(groups), open_ones[owners.others(phase, open_ones, _numpy(points))]])


class _Columns:
    """What is noted of each row, in few bytes."""

    def __init__(self) -> None:
        self.groups, self.digests, self.prompts = array("Q"), array("Q"), array("Q")
        self.origins, self.held_out, self.rankings = array("H"), array("b"), array("Q")
        self.undecided, self.points = array("Q"), array("Q")

    def add(self, group: int, whole: int, prompt: int, origin: int, held_out: bool, ranking: int) -> None:
        self.groups.append(group)
        self.digests.append(whole)
        self.prompts.append(prompt)
        self.origins.append(origin)
        self.held_out.append(held_out)
        self.rankings.append(ranking)

    def gathered(self, file: Path, ledgers: list[Ledger]) -> Gathered:
        held_out, usable = _numpy(self.held_out) != 0, np.ones(len(self.groups), dtype=bool)
        columns = (_numpy(self.groups), _numpy(self.digests), _numpy(self.origins))
        return Gathered(file, *columns, held_out, usable, _numpy(self.rankings), ledgers)


def _numpy(values: Any) -> np.ndarray:
    return np.frombuffer(values, dtype=values.typecode) if len(values) else np.zeros(0, dtype=values.typecode)


def _placed(row: Row, origin: Origin, phase: Phase, options: DataOptions, owners: Owners) -> tuple[str, int, int]:
    """(the share that a row of `origin` is in, as `phase` sees it; the digest of its group; its point in data_split).

    The share is UNDECIDED where other rows of the group decide, too.
    """
    one, point, group = group_digest(row, options.data_seed)
    share = "evaluation" if origin.use == "evaluation" else share_at(one, point, options)
    if share != "evaluation" and origin.use == "only":
        share = phase
    elif share != "evaluation" and not owners.are_clear(row):
        share = UNDECIDED
    return share, group, point


def _sound_rows(origin: Origin, phase: Phase, options: DataOptions, ledger: Ledger) -> Iterator[Row]:
    """The rows; what is in place of one is counted."""
    for row in origin.rows(phase):
        ledger.rows += 1
        if isinstance(row, Row):
            yield row
        elif row.bad:
            ledger.drop(MALFORMED)
            if len(ledger.bad) < max(SHOWN, options.skip_bad_rows):
                ledger.bad.append(row.reason)
        else:
            ledger.drop(row.reason)
        if ledger.rows == ALL_BAD == ledger.fates[MALFORMED] > options.skip_bad_rows:
            return  # another kind of data altogether


def _refusal(origin: Origin, ledger: Ledger) -> str:
    count = ledger.fates[MALFORMED]
    allowed = f"--skip-bad-rows {count} goes on without {'it' if count == 1 else 'them'}"
    if count == ledger.rows > 1:
        return f"{ledger.bad[0]}; and so on: none of the first {count} rows can be read"
    if count == 1:
        return f"{ledger.bad[0]}; {allowed}"
    listed = "".join(f"\n  {message}" for message in ledger.bad[:SHOWN])
    first = f"the first {SHOWN}" if count > SHOWN else "they are"
    return f"{origin.location}: {count} malformed rows of {ledger.rows}; {allowed}; {first}:{listed}"


class Needs:
    """How many more rows an endless origin must give."""

    def __init__(self, origin: Origin, options: DataOptions, phase: Phase) -> None:
        self._streaming = origin.streaming
        if not self._streaming:
            return
        if options.max_train_rows is None:
            raise UserError(f"{origin.location}: streaming reads the first rows only; say how many: --max-train-rows N")
        if origin.use == "shared" and not options.data_split[PHASES.index(phase)]:
            raise UserError(f"{origin.location}: --data-split gives {phase} nothing of this stream, which has no end")
        holds_out = origin.use == "evaluation" or (options.eval_fraction > 0 and not options.eval_data_path)
        self._left = {
            True: options.max_eval_rows if holds_out else 0,
            False: 0 if origin.use == "evaluation" else SPARE * options.max_train_rows,
        }

    def are_met(self, share: str) -> bool:
        if not self._streaming:
            return False
        self._left[share == "evaluation"] -= 1
        return max(self._left.values()) <= 0


def _exclude_repeated(rows: Gathered, prompts: np.ndarray) -> None:
    """Leave one row of every prompt: the first by content, whatever the order of the files."""
    positions = np.flatnonzero(rows.usable)
    positions = positions[np.argsort(rows.digests[positions], kind="stable")]
    _, first = np.unique(prompts[positions], return_index=True)
    again = rows.usable.copy()
    again[positions[first]] = False
    _exclude(rows, again, "repeated prompt")


def _exclude(rows: Gathered, those: np.ndarray, reason: str) -> None:
    those = those & rows.usable
    rows.count(np.flatnonzero(those), reason)
    rows.usable[those] = False


class Writer:
    """Rows as JSON text in an Arrow file, some in memory at a time."""

    def __init__(self, file: Path) -> None:
        self._schema = pyarrow.schema({"row": pyarrow.string()})
        self._stream = pyarrow.ipc.new_stream(str(file), self._schema)
        self._texts: list[str] = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._stream.close()

    def write(self, text: str) -> None:
        self._texts.append(text)
        if len(self._texts) == ROWS_IN_BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._texts:
            self._stream.write_batch(pyarrow.record_batch([pyarrow.array(self._texts)], schema=self._schema))
            self._texts = []


def to_text(row: Row, phase: Phase) -> str:
    """What the phase still needs of a row. Group and columns are for reward functions, so only ppo keeps all of them.

    Raises: UserError for a column that is no JSON value.
    """
    group, columns = row.group, row.columns
    if phase != "ppo":
        group, columns = "", {k: v for k, v in columns.items() if k == "margin"}
    prompt = [[message.role, message.content] for message in row.prompt]
    try:
        return ENCODER.encode([prompt, row.response, row.rejected, group, columns])
    except (TypeError, ValueError) as error:
        raise UserError(f"columns {', '.join(columns)}: {error}; expected text, numbers, lists and mappings") from None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return None  # pictures and the like say nothing to a reward function over text
    raise TypeError(f"got a {type(value).__name__}")


ENCODER = JSONEncoder(default=_plain)


def from_text(text: str) -> Row:
    prompt, response, rejected, group, columns = json.loads(text)
    return Row(tuple(Message(role, content) for role, content in prompt), response, rejected, group, columns)
