"""Held-out responses before and after, side by side, and their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.report.records import Row, StageRecord, number

MOST = 300
"""samples of a page"""


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
    """samples before the choice of MOST"""


def sample_table(stages: Sequence[tuple[int, str, StageRecord]]) -> SampleTable:
    """The samples of the last evaluation of each run; with too many, evenly spaced ones in the order of the gain of
    the first number."""
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
    return SampleTable(tuple(labels.values()), tuple(_by_gain(samples)), len(samples))


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


def _by_gain(samples: Sequence[Sample]) -> list[Sample]:
    """MOST samples, evenly spaced in the order of their gains: those with the largest gain and loss are among them."""
    ordered = sorted(samples, key=_gain, reverse=True)
    last = len(ordered) - 1
    return [ordered[n * last // (MOST - 1)] for n in range(MOST)] if last >= MOST else ordered


def _gain(sample: Sample) -> float:
    gains = [each.gain for each in sample.numbers if each.gain is not None]
    return gains[0] if gains else 0.0
