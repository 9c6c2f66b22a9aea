"""The output of a running program: results on stdout, progress on stderr. Only rank 0 writes.

On a terminal a loop has a progress bar. In a log it has a line with date and time at its first step, then every EVERY_S
seconds, and at its last step. Torch-free, so that the first line is printed at once.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tqdm import tqdm

from rlhf.streams import printable

EVERY_S = 30.0
"""seconds between two lines of a loop in a log"""
OPTION_NAMES = "RLHF_OPTION_NAMES"
"""variable by which a chain tells a stage how its options are typed"""
SILENT = "RLHF_SILENT"
"""variable by which a rehearsal keeps the results of its random models from the screen"""
Numbers = Mapping[str, float]


class Bar(Protocol):
    """The progress of a loop."""

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        """`count` more steps are done. `numbers`: current values to show; `title`: the new title of the loop."""


def status(text: str) -> None:
    """Print one line on stderr; in a log with date and time."""
    if not _is_rank_0():
        return
    stamp = "" if sys.stderr.isatty() else time.strftime("%Y-%m-%d %H:%M:%S ")
    with tqdm.external_write_mode(file=sys.stderr):
        print(f"{stamp}{printable(text)}", file=sys.stderr, flush=True)


def words(argv: Sequence[str] | None) -> list[str]:
    """The words after a program's name: `argv`, or those of this process, which only this function reads."""
    return list(sys.argv[1:] if argv is None else argv)


def loading(what: str, argv: Sequence[str], silent: bool = False) -> None:
    """Print that libraries are being loaded, which takes seconds, and turn off their log lines. Nothing is printed if
    they are already loaded, or if `argv` only asks for a text such as --help."""
    quiet_logs()
    if not silent and "torch" not in sys.modules and not {"--help", "-h", "--help-all", "--print-config"} & {*argv}:
        status(f"{what}: loading libraries")


@contextlib.contextmanager
def bar(title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """The progress of a loop of `total` steps, of which `done` were done in an earlier run."""
    if not sys.stderr.isatty():
        yield _Log(title, total, done)
        return
    hidden = not _is_rank_0()
    with tqdm(
        total=total, initial=done, desc=title, disable=hidden, mininterval=0.2, dynamic_ncols=True
    ) as progress_bar:
        yield _Terminal(progress_bar)


class _Terminal:
    def __init__(self, progress_bar: tqdm) -> None:
        self._progress_bar = progress_bar

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        if title is not None:
            self._progress_bar.set_description(title, refresh=False)
        if numbers:
            self._progress_bar.set_postfix_str(_format_numbers(numbers, "="), refresh=False)
        self._progress_bar.update(count)


class _Log:
    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done, self._resumed_at = title, total, done, done
        self._start = time.monotonic()
        self._last_line_time: float | None = None

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        self._title = title or self._title
        self._done += count
        now = time.monotonic()
        if self._last_line_time is None or self._done >= self._total or now - self._last_line_time >= EVERY_S:
            self._last_line_time = now
            status(self._line(now, numbers or {}))

    def _line(self, now: float, numbers: Numbers) -> str:
        step_seconds = (now - self._start) / max(1, self._done - self._resumed_at)
        remaining = f", {duration(step_seconds * (self._total - self._done))} left" if self._done < self._total else ""
        values = f": {_format_numbers(numbers, ' ', ', ')}" if numbers else ""
        share = 100 * self._done // max(1, self._total)
        done = f"{self._done} of {self._total} ({share} %)"
        return f"{self._title}: {done}, {duration(step_seconds)} each{remaining}{values}"


def _format_numbers(numbers: Numbers, equals: str, separator: str = " ") -> str:
    return separator.join(f"{name}{equals}{value:.3g}" for name, value in numbers.items())


def duration(seconds: float) -> str:
    """Seconds as text with two digits or two units: `0.42 s`, `42 s`, `3 min`, `1 h 58 min`, `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Bytes as text, with one to three digits before the point: `340 MB`, `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print one line on stdout."""
    if _is_rank_0() and SILENT not in os.environ:
        with tqdm.external_write_mode():  # hides a progress bar while the line is printed
            print(printable(as_typed(text)), flush=True)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Inside, this process and those that start show progress and errors only."""
    os.environ[SILENT] = "1"
    try:
        yield
    finally:
        del os.environ[SILENT]


@contextlib.contextmanager
def option_names(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, processes that start spell options in their messages as the user types them here: {name there: here}."""
    os.environ[OPTION_NAMES] = json.dumps(names)
    try:
        yield
    finally:
        del os.environ[OPTION_NAMES]


def as_typed(text: str, names: Mapping[str, str] | None = None) -> str:
    """A message with its options by the names that the user types; by default those of `option_names`."""
    known = json.loads(os.environ.get(OPTION_NAMES, "{}")) if names is None else names
    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)", lambda option: f"--{known.get(option[1], option[1])}", text)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on stdout; the cells are plain text, not markup."""
    cells = list(rows)
    if not _is_rank_0() or not cells or SILENT in os.environ:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_lines=True, title_justify="left")
    for name in columns:
        table.add_column(Text(printable(name)), overflow="fold")
    for row in cells:
        table.add_row(*(Text(printable(_clipped(cell))) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _clipped(text: str, length: int = 300) -> str:
    text = text.strip()
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def metrics_line(metrics: Mapping[str, float]) -> str:
    """`eval_accuracy 0.93, eval_loss 0.21`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def quiet_logs() -> None:
    """Turn off log lines of libraries below errors. Imports none of them: some log while they are imported."""
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "huggingface_hub", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_is_error)  # not a level: DeepSpeed sets its own when it is imported


def _is_error(line: logging.LogRecord) -> bool:
    return line.levelno >= logging.ERROR


def quiet_libraries() -> None:
    """Turn off the libraries' own progress bars, notices and warnings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    quiet_logs()
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|transformers|peft|datasets)(\.|$)")
