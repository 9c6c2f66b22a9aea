"""Non-finite numbers: they are reported and counted, their step is skipped, and too many in a row end the run."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf import console
from rlhf.distributed import collectives
from rlhf.types import Metrics

SHOWN = 8
"""rows that a message lists"""


class NonFiniteError(ArithmeticError):
    """The run must end."""


@dataclass
class Tolerance:
    """Counts the steps that were skipped because of a non-finite number; `limit` in a row end the run."""

    limit: int
    in_a_row: int = 0

    def reset(self) -> None:
        """All numbers were finite."""
        self.in_a_row = 0

    def skip(self, title: str, problems: Sequence[str], rows: Sequence[int]) -> None:
        """Count and report a skipped step; every rank calls this together.

        title: such as `step 7`; problems: of this rank, such as `loss is nan`; rows: training rows that may cause it
        Raises: NonFiniteError, on every rank, if it is the `limit`th in a row.
        """
        self.in_a_row += 1
        reports = collectives.gather_objects((tuple(problems), tuple(rows)))
        names = dict.fromkeys(name for names, _ in reports for name in names)
        message = f"{title}: {', '.join(names)}{_rows(sorted({row for _, rank_rows in reports for row in rank_rows}))}"
        if self.in_a_row >= self.limit:
            times = f", {self.limit} times in a row" if self.limit > 1 else ""
            advice = "expected a finite number. Lower --learning-rate, or check the rows of this batch"
            raise NonFiniteError(f"{message}{times}; {advice}")
        console.say(
            f"warning, {message}; skipped, nothing was learned from it ({self.in_a_row} of {self.limit} in a row)"
        )


def is_skipped(metrics: Metrics) -> bool:
    """Whether nothing was learned from a step, or from any optimizer step of an iteration."""
    whole = metrics.get("skipped") or metrics.get("skipped_iteration")
    return bool(whole) or 0 < metrics.get("optimizer_steps", 0.0) <= metrics.get("skipped_steps", 0.0)


def _rows(rows: Sequence[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f" (training rows {', '.join(map(str, rows[:SHOWN]))}{more})"
