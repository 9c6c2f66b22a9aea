"""Observers of a run: metrics.jsonl, a bar, TensorBoard, the words and tables a person reads. Rank 0 speaks."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rlhf import console
from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.types import Metrics

EVALUATION = "eval_"
"""How the names of numbers on held-out rows begin."""


class MetricsFile:
    """Appends one JSON object a line, with the step and the seconds since it was opened."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._start = time.monotonic()

    def write(self, kind: str, step: int, metrics: Metrics) -> None:
        row = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self._start, 3)}
        self._append(row | {name: _plain(value) for name, value in metrics.items()})

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        row = {"kind": "warning", "step": step, "seconds": round(time.monotonic() - self._start, 3)}
        shown = {number: _plain(value) for number, value in numbers.items()}
        self._append(row | {"name": name, "numbers": shown, "advice": advice})

    def _append(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._file.name}: cannot be written ({error.strerror}); make room there, and the same command goes "
                "on from the last checkpoint"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row that could not be written
            self._file.close()


def _plain(value: float) -> float | None:
    # JSON has no NaN; six significant digits are more than any of these numbers has.
    return float(f"{value:.6g}") if math.isfinite(value) else None


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, directory: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=done + 1 if done else None)

    def write(self, kind: str, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        self._writer.add_text(f"warning/{name}", f"{console.metrics_line(numbers)}: {advice}", step)

    def close(self) -> None:
        self._writer.close()


class Recorder:
    """Follows one stage: every step into the writers, a few numbers onto the bar. Silent on other ranks.

    `done` steps were recorded before; metrics.jsonl goes on after them.
    """

    def __init__(self, directory: Path, report_to: Sequence[str] = (), done: int = 0) -> None:
        self._done = done
        self._writers: list[Any] = []
        if collectives.is_main():
            self._writers = [MetricsFile(directory / "metrics.jsonl")]
            if "tensorboard" in report_to:
                self._writers.append(TensorBoard(directory / "tensorboard", done))

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
        self._each(lambda writer: writer.write(kind, step, metrics))

    def _each(self, tell: Callable[[Any], None]) -> None:
        """Tell every writer. A tracker that fails is said once and then left out; metrics.jsonl may not fail."""
        for writer in tuple(self._writers):
            with contextlib.ExitStack() as stack:
                if not isinstance(writer, MetricsFile):
                    stack.push(partial(self._leave_out, writer))
                tell(writer)

    def _leave_out(self, writer: Any, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        self._writers.remove(writer)
        reason = " ".join(f"{kind.__name__}: {error}".split())[:200]
        console.say(
            f"warning: {type(writer).__name__} fails and is left out from here on ({reason}); metrics.jsonl has it all"
        )
        return True

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        """Say in one line that something looks wrong, with its numbers and the next step; also into the writers."""
        console.say(f"warning, step {step}: {name} ({console.metrics_line(numbers)}): {advice}")
        self._each(lambda writer: writer.warn(step, name, numbers, advice))

    def close(self) -> None:
        self._each(lambda writer: writer.close())


def _by_kind(metrics: Metrics) -> dict[str, Metrics]:
    parts: dict[str, Metrics] = {"train": {}}
    for name, value in metrics.items():
        parts.setdefault("eval" if name.startswith(EVALUATION) else "train", {})[name] = value
    return parts
