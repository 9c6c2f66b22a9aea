"""What the training taught: words and endings that became more or less frequent in the held-out responses."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf.maths.intervals import Interval, log_odds_change
from rlhf.report.records import Row

WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
MOST = {"word": 8, "ending": 3}
"""rows of the table, of those that became more frequent, and of the others"""


@dataclass(frozen=True, slots=True)
class Taught:
    """A word, or the last word, of the responses."""

    kind: str
    text: str
    before: int
    """responses that have it"""
    after: int
    change: Interval
    """of its log-odds"""


def taught(samples: Sequence[Row]) -> list[Taught]:
    """The words and endings whose log-odds changed most, those that rose first; the 95 % intervals do not cover 0."""
    words = [[WORD.findall(str(row.get(side, "")).lower()) for row in samples] for side in ("before", "after")]
    kinds: dict[str, list[list[Iterable[str]]]] = {
        "word": [[{*x} for x in side] for side in words],
        "ending": [[x[-1:] for x in side] for side in words],
    }
    result = []
    for kind, sides in kinds.items():
        before, after = (Counter(text for response in side for text in response) for side in sides)
        changes = [
            Taught(kind, text, before[text], after[text], log_odds_change(before[text], after[text], len(samples)))
            for text in sorted({*before, *after})
        ]
        more = sorted((each for each in changes if each.change.low > 0), key=lambda each: -each.change.low)
        less = sorted((each for each in changes if each.change.high < 0), key=lambda each: each.change.high)
        result += more[: MOST[kind]] + less[: MOST[kind]]
    return result
