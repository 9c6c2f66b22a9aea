"""A table of records, in files or on the hub, read through the `parse` of one adapter."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from data.read.places import HubDataset, Place, TableConfig
from data.read.records import Phase, Record, Skipped, Unusable, names
from rlhf.errors import UserError
from rlhf.types import Message, Row

DEEPEST = 100
"""levels of lists and mappings in a column: Python's readers and writers of JSON end at some 900"""
NO_COUNTERPART = "no counterpart of the other label"


@dataclass(frozen=True, slots=True)
class Ranked:
    """Several responses to one prompt, each with its worth; responses of equal worth are a tie."""

    prompt: tuple[Message, ...]
    responses: tuple[tuple[str, float], ...]
    group: str = ""
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One response that is labelled good or bad by itself."""

    prompt: tuple[Message, ...]
    response: str
    good: bool
    group: str = ""
    columns: dict[str, Any] = field(default_factory=dict)


Parsed = Row | Ranked | Labelled | list[Row]
"""What the `parse` of an adapter makes of one record."""


def in_phase(items: Iterable[Parsed | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """The rows of one phase.

    Rows are passed on as they are. Of ranked responses: the best one (sft), every pair of unequal worth (reward), the
    prompt (ppo). Of labelled ones: the good ones (sft), pairs of a good and a bad one to the same prompt (reward), the
    prompts (ppo).
    """
    pairs = _Pairs()
    for number, item in enumerate(items):
        if isinstance(item, Row | Skipped):
            yield item
        elif isinstance(item, Ranked):
            yield from ranked_rows(item, phase, f"{number}")
        elif isinstance(item, Labelled):
            yield from pairs.take(item) if phase == "reward" else _labelled_row(item, phase)
        elif item:
            yield from item
        else:
            yield Skipped("no row in it")
    yield from pairs.rest()


def ranked_rows(ranked: Ranked, phase: Phase, name: str) -> Iterator[Row | Skipped]:
    """The rows of one prompt, the best response first (InstructGPT, arXiv 2203.02155, section 3.5: all pairs).

    `name` tells this ranked list from all others of the source: it is the `ranking` of several pairs.
    """
    order = sorted(ranked.responses, key=lambda response: -response[1])
    if phase == "ppo":
        yield Row(ranked.prompt, None, None, ranked.group, ranked.columns)
    elif not order:
        yield Skipped("no response")
    elif phase == "sft":
        yield Row(ranked.prompt, order[0][0], None, ranked.group, ranked.columns)
    else:
        pairs = [(one, other) for (one, high), (other, low) in combinations(order, 2) if high > low]
        if not pairs:
            yield Skipped("tie" if len(order) > 1 else "only one response")
        for chosen, rejected in pairs:
            yield Row(ranked.prompt, chosen, rejected, ranked.group, ranked.columns, name if len(pairs) > 1 else "")


def _labelled_row(item: Labelled, phase: Phase) -> Iterator[Row | Skipped]:
    if phase == "ppo":
        yield Row(item.prompt, None, None, item.group, item.columns)
    elif item.good:
        yield Row(item.prompt, item.response, None, item.group, item.columns)
    else:
        yield Skipped("labelled bad")


@dataclass(slots=True)
class _Responses:
    """The labelled responses to one prompt so far; those still `alone`, in no pair, are all of one label."""

    good: list[Labelled] = field(default_factory=list)
    bad: list[Labelled] = field(default_factory=list)
    alone: deque[Labelled] = field(default_factory=deque)


class _Pairs:
    """Pairs of a good and a bad response to one prompt: as many as there are of the label with more.

    A response is in one pair, unless its label is short: then it serves again.
    """

    def __init__(self) -> None:
        self._prompts: dict[tuple[Message, ...], _Responses] = {}

    def take(self, item: Labelled) -> Iterator[Row]:
        """The pair that `item` completes, if any."""
        known = self._prompts.setdefault(item.prompt, _Responses())
        (known.good if item.good else known.bad).append(item)
        if known.alone and known.alone[0].good != item.good:
            yield _pair(item, known.alone.popleft())
        else:
            known.alone.append(item)

    def rest(self) -> Iterator[Row | Skipped]:
        """What the responses that are still alone come to."""
        for known in self._prompts.values():
            for number, item in enumerate(known.alone):
                others = known.bad if item.good else known.good
                yield _pair(item, others[number % len(others)]) if others else Skipped(NO_COUNTERPART)


def _pair(one: Labelled, other: Labelled) -> Row:
    good, bad = (one, other) if one.good else (other, one)
    return Row(good.prompt, good.response, bad.response, good.group, good.columns)


@dataclass(frozen=True, slots=True)
class Table:
    """A source (`data.read.records.Source`) over records.

    `parse(record, where)` raises UserError for a record that is malformed, which stops the run unless the user
    tolerates it, and Unusable for one that is sound and says nothing (a tie). `combine` is for what needs several
    records to make a row; it passes on what was skipped. `splits`: the split of each phase, where they differ.
    """

    place: Place
    config: TableConfig
    parse: Callable[[Record, str], Any]
    combine: Callable[[Iterator[Any], Phase], Iterator[Row | Skipped]] = in_phase
    splits: Mapping[Phase, str] = field(default_factory=dict)

    @property
    def streaming(self) -> bool:
        """Whether it may be read only as far as needed."""
        return self.config.streaming

    @property
    def remote(self) -> bool:
        """Whether the hub must be asked what is there."""
        return isinstance(self.place, HubDataset)

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        return self.combine(self._items(phase), phase)

    def fingerprint(self, phase: Phase) -> str:
        """What changes whenever the records do."""
        return self.place.fingerprint(self._split(phase), self.config)

    def _split(self, phase: Phase) -> str:
        return self.config.split or self.splits.get(phase, "train")

    def _items(self, phase: Phase) -> Iterator[Any]:
        for where, record in self.place.records(self._split(phase), self.config):
            if isinstance(record, Skipped):
                yield record
                continue
            try:
                _refuse_depth(record, where)
                yield self.parse(record, where)
            except UserError as mistake:
                yield Skipped(str(mistake), bad=True)
            except Unusable as reason:
                yield Skipped(str(reason))


def _refuse_depth(record: Record, where: str) -> None:
    """Raises: UserError for a column that is nested deeper than every later reader of it can follow."""
    for column, value in record.items():
        if isinstance(value, list | dict) and _nested(value, DEEPEST):
            raise UserError(f"{where}: {names([column])}: is nested more than {DEEPEST} deep; mend or remove the row")


def _nested(value: object, levels: int) -> bool:
    """Whether lists and mappings lie more than `levels` deep in each other."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_nested(inner, levels - 1) for inner in value)
