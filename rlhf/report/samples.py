"""Held-out responses before and after, side by side: which of them fit into the page, and their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import escape

from rlhf.pages.page import visible
from rlhf.report.records import Row, StageRecord, number

BUDGET = 700_000
"""bytes of all samples of a page: the page stays below 2 MB"""


@dataclass(frozen=True, slots=True)
class SampleNumber:
    """A number of one response, before and after."""

    before: float | None
    after: float | None

    @property
    def gain(self) -> float | None:
        """after - before"""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with both responses. `numbers` are in the order of the table's columns."""

    run: str
    colour: int
    question: str
    prompt: str
    before: str
    after: str
    numbers: tuple[SampleNumber, ...]
    distance: float | None


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The samples of all runs."""

    columns: tuple[str, ...]
    """labels of the numbers"""
    samples: tuple[Sample, ...]
    total: int
    """samples before the choice of those that fit"""


def sample_table(stages: Sequence[tuple[int, str, StageRecord]]) -> SampleTable:
    """The samples of the last evaluation of each run; with too many, those with the largest gains and losses of the
    first number, and evenly spaced ones between."""
    labels: dict[str, str] = {}
    for _, _, record in stages:
        for result in record.declaration.report.results:
            if result.sample and any(result.sample in row for row in record.samples):
                labels[result.sample] = result.label
    samples = [
        _sample(row, colour, run, [*labels], record.declaration.report.distance)
        for colour, run, record in stages
        for row in record.samples
    ]
    return SampleTable(tuple(labels.values()), tuple(_fitting(samples)), len(samples))


def _sample(row: Row, colour: int, run: str, names: Sequence[str], distance: str) -> Sample:
    prompt = str(row.get("prompt", ""))
    return Sample(
        run=run,
        colour=colour,
        question=str(row.get("question") or prompt),
        prompt=prompt,
        before=str(row.get("before", "")),
        after=str(row.get("after", "")),
        numbers=tuple(SampleNumber(number(row, f"{name}_before"), number(row, name)) for name in names),
        distance=number(row, distance),
    )


def _fitting(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, sorted by gain, that fit into BUDGET: the outermost, the middle, then the middles between them."""
    ordered = sorted(samples, key=_gain)
    chosen: list[int] = []
    size = 0
    for index in _outside_in(len(ordered)):
        sample = ordered[index]
        texts = (sample.question, sample.prompt, sample.before, sample.after)
        size += 600 + sum(len(escape(visible(text)).encode("utf-8", "backslashreplace")) for text in texts)
        if size > BUDGET:
            break
        chosen.append(index)
    return [ordered[index] for index in sorted(chosen, reverse=True)]


def _gain(sample: Sample) -> float:
    gains = [each.gain for each in sample.numbers if each.gain is not None]
    return gains[0] if gains else 0.0


def _outside_in(count: int) -> list[int]:
    """The numbers below `count`: for each number one from the top, one from the bottom, and one evenly spaced."""
    order: dict[int, None] = {}
    for n in range((count + 1) // 2):
        # the golden ratio spreads any number of points evenly over the range
        order |= dict.fromkeys((count - 1 - n, n, int(n * 0.6180339887 % 1 * count)))
    return [*order]
