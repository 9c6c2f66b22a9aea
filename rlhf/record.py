"""Observers of a run: metrics.jsonl, a bar, TensorBoard, the words and tables a person reads. Rank 0 speaks."""

import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from rlhf import dist, status
from rlhf.config import UserError
from rlhf.types import Metrics

EVALUATION = "eval_"
"""How the names of numbers on held-out rows begin."""


def quiet_libraries() -> None:
    """Libraries report through our bar and errors; their own bars and notices go."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "huggingface_hub"):
        # Not by level: DeepSpeed sets its own when it is imported.
        logging.getLogger(name).addFilter(lambda line: line.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|transformers|peft|datasets)(\.|$)")


def say(text: str) -> None:
    """One line to the person who waits."""
    if dist.is_main():
        bars = {} if (sys.stdout.encoding or "").lower().startswith("utf") else str.maketrans("▁▂▃▄▅▆▇█", ".:-=+*#@")
        with tqdm.external_write_mode():  # a bar steps aside
            print(text.translate(bars), flush=True)


def require_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--report-to {name}: the package is not installed; pip install {name}, or leave the option out"
            )


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
        self._writer.add_text(f"warning/{name}", f"{metrics_line(numbers)}: {advice}", step)

    def close(self) -> None:
        self._writer.close()


class Recorder:
    """Follows one stage: every step into the writers, a few numbers onto the bar. Silent on other ranks.

    `done` steps were recorded before; metrics.jsonl goes on after them.
    """

    def __init__(self, directory: Path, report_to: Sequence[str] = (), done: int = 0) -> None:
        self._done = done
        self._writers: list[Any] = []
        if dist.is_main():
            self._writers = [MetricsFile(directory / "metrics.jsonl")]
            if "tensorboard" in report_to:
                self._writers.append(TensorBoard(directory / "tensorboard", done))

    def follow(self, steps: Iterable[Metrics], total: int, title: str, shown: Sequence[str]) -> Generator[Metrics]:
        """Pass `steps` on, recording each; `shown` are the metrics on the bar.

        Numbers of an evaluation, whose names begin with EVALUATION, get a row of their own after the step's.
        """
        with status.bar(title, total, self._done) as bar:
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
        say(f"warning: {type(writer).__name__} fails and is left out from here on ({reason}); metrics.jsonl has it all")
        return True

    def warn(self, step: int, name: str, numbers: Mapping[str, float], advice: str) -> None:
        """Say in one line that something looks wrong, with its numbers and the next step; also into the writers."""
        say(f"warning, step {step}: {name} ({metrics_line(numbers)}): {advice}")
        self._each(lambda writer: writer.warn(step, name, numbers, advice))

    def close(self) -> None:
        self._each(lambda writer: writer.close())


def _by_kind(metrics: Metrics) -> dict[str, Metrics]:
    parts: dict[str, Metrics] = {"train": {}}
    for name, value in metrics.items():
        parts.setdefault("eval" if name.startswith(EVALUATION) else "train", {})[name] = value
    return parts


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the terminal; text is shown as it is, never as markup."""
    cells = list(rows)
    if not dist.is_main() or not cells:
        return
    from rich.text import Text

    table = Table(title=Text(title), show_lines=True, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*(Text(_clipped(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)


def _clipped(text: str, length: int = 300) -> str:
    text = text.strip()
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def metrics_line(metrics: Mapping[str, float]) -> str:
    """`eval_accuracy 0.93, eval_loss 0.21`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
