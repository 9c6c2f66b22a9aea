"""A source over records: reads them from files or the hub, and parses each with the `parse` of an adapter."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from data.read.paths import HubDataset, RecordReader, TableConfig
from data.read.records import Phase, Record, Skipped, Unusable
from rlhf.errors import UserError
from rlhf.types import Message, Row

NO_COUNTERPART = "no counterpart of the other label"
LABELLED_BAD = Skipped("labelled bad")


@dataclass(frozen=True, slots=True)
class Ranked:
    """Several responses to one prompt, as (text, rating). A higher rating is better; equal ratings are a tie."""

    prompt: tuple[Message, ...]
    responses: tuple[tuple[str, float], ...]
    group: str = ""
    columns: Record = field(default_factory=dict)
    location: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One response with a label: good or bad."""

    prompt: tuple[Message, ...]
    response: str
    good: bool
    group: str = ""
    columns: Record = field(default_factory=dict)
    location: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A dialogue that ends in the user's turn after an answer, such as a word of thanks."""

    whole: Row
    """a prompt that ends there"""
    answered: Row
    """its last answer, and what came before"""


Parsed = Row | Ranked | Labelled | Unanswered
"""what the `parse` of an adapter returns for one record"""
LOCATED = (Row, Ranked, Labelled)


def phase_rows(items: Iterable[Parsed | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """The rows of one phase.

    Rows pass unchanged. Ranked responses give the best one (sft), all pairs of different rating (reward) or the prompt
    (ppo). A dialogue that ends in the user's turn gives its last answer (sft), or is a prompt. Labelled responses give
    the good ones (sft), pairs of a good and a bad one to the same prompt (reward) or the prompts (ppo).
    """
    labelled: dict[tuple[Message, ...], list[Labelled]] = {}
    for number, item in enumerate(items):
        if isinstance(item, Row | Skipped):
            yield item
        elif isinstance(item, Ranked):
            yield from ranked_rows(item, phase, f"{number}")
        elif isinstance(item, Unanswered):
            yield item.answered if phase == "sft" else item.whole
        elif phase == "reward":
            labelled.setdefault(item.prompt, []).append(item)
        elif phase == "ppo":
            yield Row(item.prompt, None, None, item.group, item.columns, location=item.location)
        elif item.good:
            yield Row(item.prompt, item.response, None, item.group, item.columns, location=item.location)
        else:
            yield LABELLED_BAD
    for responses in labelled.values():
        yield from _label_pairs(responses)


def _label_pairs(responses: Sequence[Labelled]) -> Iterator[Row | Skipped]:
    """Pairs of a good and a bad response to one prompt, as many as the more frequent label has responses.

    Each response of the more frequent label is in one pair; those of the other label repeat where they are too few.
    """
    good, bad = ([item for item in responses if item.good == label] for label in (True, False))
    for i in range(max(len(good), len(bad))):
        if good and bad:
            first = good[i % len(good)]
            response, rejected, group = first.response, bad[i % len(bad)].response, first.group
            yield Row(first.prompt, response, rejected, group, first.columns, location=first.location)
        else:
            yield Skipped(NO_COUNTERPART, location=responses[i].location)


def ranked_rows(ranked: Ranked, phase: Phase, ranking: str) -> Iterator[Row | Skipped]:
    """The rows of one prompt; its pairs in order of rating (InstructGPT, arXiv 2203.02155, section 3.5: all pairs).

    ranking: distinguishes this ranked list from all others of the source; several pairs get it as `Row.ranking`.
    """
    order = sorted(ranked.responses, key=lambda response: -response[1])
    row = Row(ranked.prompt, None, None, ranked.group, ranked.columns, location=ranked.location)
    if phase == "ppo":
        yield row
    elif not order:
        yield Skipped("no response", location=ranked.location)
    elif phase == "sft":
        yield replace(row, response=order[0][0])
    else:
        pairs = [(better, worse) for better, worse in combinations(order, 2) if better[1] > worse[1]]
        if not pairs:
            yield Skipped("tie" if len(order) > 1 else "only one response", location=ranked.location)
        own_ranking = ranking if len(pairs) > 1 else ""
        for (chosen, _), (rejected, _) in pairs:
            yield replace(row, response=chosen, rejected=rejected, ranking=own_ranking)


@dataclass(frozen=True, slots=True)
class Table:
    """A source (`data.read.records.Source`) that turns records into rows.

    `parse(record, location)` raises UserError for a malformed record, which stops the run unless the user tolerates
    it, and Unusable for a valid one that cannot be trained on (a tie). `combine(parsed, phase)` makes the rows; replace
    it where a row needs several records. It passes each Skipped on. `splits`: the split of each phase, if they differ.
    """

    reader: RecordReader
    config: TableConfig
    parse: Callable[[Record, str], object]
    combine: Callable[[Iterator[Any], Phase], Iterator[Row | Skipped]] = phase_rows
    splits: Mapping[Phase, str] = field(default_factory=dict)

    @property
    def streaming(self) -> bool:
        """Whether the rows are read only as far as needed."""
        return self.config.streaming

    @property
    def remote(self) -> bool:
        """Whether the records are on the hub."""
        return isinstance(self.reader, HubDataset)

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        rows = self.combine(self._parsed(phase), phase)
        if self.config.group is None:
            return rows
        group = {"group": self.config.group}
        return (replace(row, columns=row.columns | group) if isinstance(row, Row) else row for row in rows)

    def fingerprint(self, phase: Phase) -> str:
        """A text that changes whenever the records change."""
        return self.reader.fingerprint(self._split(phase), self.config)

    def _split(self, phase: Phase) -> str:
        return self.config.split or self.splits.get(phase, "train")

    def _parsed(self, phase: Phase) -> Iterator[object]:
        for location, record in self.reader.records(self._split(phase), self.config):
            if isinstance(record, Skipped):
                yield record
                continue
            try:
                parsed = self.parse(record, location)
                yield replace(parsed, location=location) if isinstance(parsed, LOCATED) else parsed
            except UserError as error:
                yield Skipped(str(error), bad=True)
            except Unusable as reason:
                yield Skipped(str(reason), location=location)
