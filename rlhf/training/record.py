"""The record of a run: metrics.jsonl, the trackers, a progress bar and warnings. Only rank 0 writes."""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rlhf import console
from rlhf.config import Tree
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.storage import disk
from rlhf.training.reporting import Reporter
from rlhf.training.trackers import Scalar
from rlhf.types import Metrics

EVALUATION = "eval_"
"""How the names of numbers on held-out rows begin."""
LEFT_OUT = "tracker_left_out"
"""The name of the warning of a tracker that fails."""


class MetricsFile:
    """Appends one JSON object a line, with the step and the seconds since it was opened; those of a resumed run go on
    from its last row."""

    def __init__(self, path: Path) -> None:
        before = max((float(row.get("seconds", 0.0)) for row in disk.json_lines(path)), default=0.0)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._start = time.monotonic() - before

    def write(self, kind: str, step: int, metrics: Metrics) -> None:
        self._append(kind, step, {name: _plain(value) for name, value in metrics.items()})

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        shown = {number: _plain(value) for number, value in numbers.items()}
        self._append("warning", step, {"name": name, "numbers": shown, "advice": advice})

    def _append(self, kind: str, step: int, content: Tree) -> None:
        row = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self._start, 3)}
        for name in row.keys() & content.keys():
            raise UserError(f"{self._file.name}: a metric is named {name}, as a column of every row; rename it")
        try:
            self._file.write(json.dumps(row | content) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._file.name}: cannot be written ({error.strerror}); free space there, and the same command "
                "resumes from the last checkpoint"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row that could not be written
            self._file.close()


def _plain(value: float) -> float | None:
    number: float | None = disk.json_value(float(f"{value:.6g}"))  # no more digits than any of these numbers has
    return number


class Recorder:
    """Observes one stage: writes every step to metrics.jsonl and the trackers, and some numbers to the progress bar.
    Only rank 0 writes, and has a reporter.

    `done` steps were recorded before; metrics.jsonl continues after them.
    """

    def __init__(self, directory: Path, done: int = 0, reporter: Reporter | None = None) -> None:
        self._done, self._step, self._reporter = done, done, reporter
        self._file = MetricsFile(directory / "metrics.jsonl") if collectives.is_main() else None

    def follow(self, steps: Iterable[Metrics], total: int, title: str, shown: Sequence[str]) -> Generator[Metrics]:
        """Pass `steps` on, recording each; `shown` are the metrics on the bar.

        Numbers of an evaluation, whose names begin with EVALUATION, get a row of their own after the step's.
        """
        with console.bar(title, total, self._done) as bar:
            for step, metrics in enumerate(steps, start=self._done + 1):
                for kind, numbers in _by_kind(metrics).items():
                    self.write(kind, step, numbers)
                bar.advance(1, {name: metrics[name] for name in shown if name in metrics})
                yield metrics

    def write(self, kind: str, step: int, metrics: Metrics) -> None:
        self._step = step
        if self._file is not None:
            self._file.write(kind, step, metrics)
        if self._reporter is not None:
            self._reporter.metrics(kind, step, metrics)

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        """Say in one line that something looks wrong, with its numbers and the next step; also to file and trackers."""
        shown, advice = console.metrics_line(numbers), console.as_typed(advice)
        console.say(f"warning, step {step}: {name} ({shown}): {advice}")
        if self._file is not None:
            self._file.warn(step, name, numbers, advice)
        if self._reporter is not None:
            self._reporter.text("warning", step, name, f"{shown}: {advice}")

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Scalar]]) -> None:
        """Send rows with the same columns to the trackers. A stage has them in a file of its own."""
        if self._reporter is not None:
            self._reporter.table(name, step, rows)

    def verdict(self, step: int, describe: Callable[[], str]) -> None:
        """Send the result of the finished stage, in words, to the trackers; `describe` is called if there are any."""
        if self._reporter is not None:
            self._reporter.verdict(step, describe)

    def close(self) -> None:
        """End the trackers' runs, record which have failed, and close the file. A second call does nothing."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.close()
        if self._file is not None:
            with contextlib.suppress(UserError):  # of a full disk
                for failure in reporter.failures if reporter is not None else ():
                    self._file.warn(self._step, LEFT_OUT, {}, failure)
            self._file.close()


def _by_kind(metrics: Metrics) -> dict[str, Metrics]:
    parts: dict[str, Metrics] = {"train": {}}
    for name, value in metrics.items():
        parts.setdefault("eval" if name.startswith(EVALUATION) else "train", {})[name] = value
    return parts
