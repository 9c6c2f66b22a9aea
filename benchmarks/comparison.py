"""What every comparison of contenders does: options, a run of all contenders, the result, the program around them."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import harness, outcome
from benchmarks.goals import goal
from benchmarks.harness import MACHINE, OURS, Program, Rows
from rlhf.config import parser


class TrainingOptions(harness.Options):
    """Options of comparisons that train."""

    batch_size: int = Field(8, ge=1)
    """rows of an optimizer step: dialogues, pairs or responses"""
    micro_batch_size: int = Field(8, ge=1)
    """ours: rows of a forward and backward pass"""
    lora: int | None = Field(None, ge=1)
    """rank of LoRA on all linear layers, alpha twice the rank; none: all weights are trained"""


def adapter(rank: int | None) -> str | None:
    """Our option `adapter` for LoRA of this rank."""
    return None if rank is None else f"lora,r={rank},lora_alpha={2 * rank}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison, `python -m benchmarks.NAME`."""

    name: str
    summary: str
    """of the program's help"""
    options: type[harness.Options]
    unit: str
    """what is counted per second"""
    peer: str
    """the libraries beside ours, for the result"""
    programs: Mapping[str, Program]
    """by the contenders' names"""
    goals: Mapping[str, str]
    """peer -> the name in GOALS of our ratio to it"""
    prepare: Callable[[Any, Path], tuple[dict[str, Any], Any]]
    """(options, folder) -> (settings of the contenders, data for the report)"""
    report: Callable[[Any, Rows, Any], dict[str, Any]]
    """(options, rows, data) -> further measurements"""
    works: Callable[[Any], Sequence[str]] = lambda _: ("all",)
    """options -> the kinds of work"""

    def measure(self, options: Any) -> dict[str, Any]:
        """All measurements, as written to the JSON file."""
        lora, works = getattr(options, "lora", None), self.works(options)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings, data = self.prepare(options, folder)
            programs = harness.select_contenders(self.programs, options)
            module = f"benchmarks.{self.name}"
            with harness.start_contenders(module, programs, settings, options.threads, folder) as contenders:
                rows = harness.alternate(contenders, options.repeats, works)
                targets = {(peer, work): goal(name, lora) for peer, name in self.goals.items() for work in works}
                return outcome.results(
                    self.name if lora is None else f"{self.name}_lora", options, contenders, rows, self.unit,
                    peer=self.peer, **self.report(options, rows, data),
                    ratios=outcome.ratios(rows, self.unit, targets), limits=outcome.limits(rows),
                )  # fmt: skip

    def main(self) -> int:
        """The program: all contenders, or one of them as the harness starts it."""
        if sys.argv[1:2] == ["--contender"]:
            return harness.run_contender(self.programs, sys.argv[2:])
        options = parser.parse(self.options, sys.argv[1:], f"python -m benchmarks.{self.name}", self.summary)
        outcome.write(self.measure(options), options)
        return 0


def peak_share(rows: Rows, who: str, gflop: Sequence[float], dtype: str, seconds: str = "seconds") -> dict[str, Any]:
    """A contender's share of the matrix-product peak of the same turns. gflop: needed work of each turn

    seconds: the column with the time of that work
    """
    turns = zip(gflop, rows[who]["all"], rows[MACHINE]["all"], strict=True)
    values = [work / row[seconds] / machine[f"{dtype}_gflops"] for work, row, machine in turns]
    return outcome.share(values, *(goal("training, share of the peak") if who == OURS else (None, None)))
