"""For whom a stage got better: its held-out numbers for each group of rows that is large enough.

The verdict does not depend on them. With four groups of 50 prompts, a group that loses 0.3 standard deviations is seen
to lose in 33 % of runs only; and of runs in which each group gains 0.2, 28 % have a group with a negative mean
(simulated, 2026-11-28). So a line says what is not excluded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlhf.config import Tree
from rlhf.config.declaration import Result
from rlhf.maths.intervals import Interval, mean_interval
from rlhf.maths.preferences import accuracy
from rlhf.pages.numbers import MINUS, with_half_width
from rlhf.report.records import StageRecord, before_and_after

LEAST = 20
"""held-out prompts, or pairs, of a group that has a line"""
Parts = Mapping[str, Sequence[int]]
"""the positions of the rows of each group"""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A number of one group. In 95 % of runs, all intervals of one number contain what they estimate."""

    group: str
    label: str
    """of the number"""
    line: str
    interval: Interval


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a stage's held-out rows."""

    results: tuple[GroupResult, ...]
    left_out: str
    """a sentence on the rows that have no line; or empty"""


def groups(stage: StageRecord) -> Groups | None:
    """The groups of a stage; None if its held-out rows have none."""
    scores = stage.pair_scores or {}
    names = [str(row.get("group") or "") for row in stage.samples] or scores.get("group", [])
    if not any(names):
        return None
    parts = {name: [i for i, other in enumerate(names) if other == name] for name in sorted({*names} - {""})}
    declared = stage.declaration.report.results
    results = [each for result in declared if result.sample for each in _gains(stage, result, parts)]
    if "group" in scores:
        results += _accuracies(scores, declared[0], parts)
    sizes, shown = Counter(names), {each.group for each in results}
    small = [sizes[name] for name in parts if name not in shown]
    counts = {f"in {len(small)} smaller group{'s' if len(small) > 1 else ''}": sum(small), "in no group": sizes[""]}
    rest = " and ".join(f"{count} {where}" for where, count in counts.items() if count)
    return Groups(tuple(results), f"A line needs {LEAST} held-out rows; {rest} have none." if rest else "")


def _gains(stage: StageRecord, result: Result, parts: Parts) -> Iterator[GroupResult]:
    """The mean gain of each group by a number that each response has before and after."""
    pairs = {name: before_and_after([stage.samples[i] for i in rows], result.sample) for name, rows in parts.items()}
    gains = {name: [after - old for old, after in numbers] for name, numbers in pairs.items() if len(numbers) >= LEAST}
    for name, differences in gains.items():
        gain = mean_interval(torch.tensor(differences, dtype=torch.float64), together=len(gains))
        mean, low, high = _shown(gain)
        ending = f"a loss of up to {low.lstrip(MINUS)} is not excluded" if gain.low < 0 else "no loss"
        ending = "better" if gain.low > 0 else "worse" if gain.high < 0 else ending
        line = f"{name} ({len(differences)} prompts): gain {mean}, between {low} and {high}; {ending}"
        yield GroupResult(name, result.label, line, gain)


def _accuracies(scores: Tree, result: Result, parts: Parts) -> Iterator[GroupResult]:
    """The share of the pairs of each group in the right order; all pairs of one ranked list count as one."""
    gaps, elements = torch.tensor(scores["chosen"]) - torch.tensor(scores["rejected"]), torch.tensor(scores["element"])
    counts = {name: len(elements[rows].unique()) for name, rows in parts.items()}
    counts = {name: count for name, count in counts.items() if count >= LEAST}
    for name, count in counts.items():
        share = accuracy(gaps[parts[name]], elements[parts[name]], together=len(counts))
        mean, low, high = _shown(Interval(*(100 * x for x in (share.mean, share.low, share.high))))
        ending = "better than guessing" if share.low > 0.5 else "guessing is not excluded"
        ending = "worse than guessing" if share.high < 0.5 else ending
        yield GroupResult(
            name, result.label, f"{name} ({count} pairs): {mean} %, between {low} and {high} %; {ending}", share
        )


def _shown(interval: Interval) -> list[str]:
    """The mean and both ends with the decimals of the interval."""
    return [with_half_width(x, interval.half_width)[0] for x in (interval.mean, interval.low, interval.high)]
