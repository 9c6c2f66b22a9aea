"""What a person reads while a program runs: results on stdout, progress on stderr. Rank 0 alone writes.

On a terminal a loop has a bar. In a log, where a bar would be one line without end, it has a line with date and time
at its first step, then every EVERY_S seconds, and at its last step. Torch-free, so that the first line comes at once.
"""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tqdm import tqdm

EVERY_S = 30.0
"""seconds between two lines of a loop in a log"""
Numbers = Mapping[str, float]


class Bar(Protocol):
    """How far a loop is."""

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        """So many steps more are done; `numbers` are the newest to show, `title` is what the loop does from now on."""


def status(text: str) -> None:
    """A line, in a log with date and time."""
    if not _speaks():
        return
    stamp = "" if sys.stderr.isatty() else time.strftime("%Y-%m-%d %H:%M:%S ")
    with tqdm.external_write_mode(file=sys.stderr):
        print(f"{stamp}{text}", file=sys.stderr, flush=True)


def program(otherwise: str) -> str:
    """What the user typed before the options: `rlhf VERB`, or `otherwise` where no verb was called."""
    return sys.argv[0] if sys.argv[0].startswith("rlhf ") else otherwise


def loading(what: str, argv: Sequence[str], silent: bool = False) -> None:
    """Say that libraries are loading, which takes seconds, unless they are there or `argv` only asks for a text."""
    if not silent and "torch" not in sys.modules and not {"--help", "-h", "--help-all", "--print-config"} & {*argv}:
        status(f"{what}: loading libraries")


@contextlib.contextmanager
def bar(title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """How far a loop of `total` steps is, `done` of which were done before."""
    if not sys.stderr.isatty():
        yield _Log(title, total, done)
        return
    hidden = not _speaks()
    with tqdm(total=total, initial=done, desc=title, disable=hidden, mininterval=0.2, dynamic_ncols=True) as shown:
        yield _Terminal(shown)


class _Terminal:
    def __init__(self, shown: tqdm) -> None:
        self._shown = shown

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        if title is not None:
            self._shown.set_description(title, refresh=False)
        if numbers:
            self._shown.set_postfix_str(_words(numbers, "="), refresh=False)
        self._shown.update(count)


class _Log:
    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done, self._before = title, total, done, done
        self._start = time.monotonic()
        self._told: float | None = None

    def advance(self, count: int = 1, numbers: Numbers | None = None, title: str | None = None) -> None:
        self._title = title or self._title
        self._done += count
        now = time.monotonic()
        if self._told is None or self._done >= self._total or now - self._told >= EVERY_S:
            self._told = now
            status(self._line(now, numbers or {}))

    def _line(self, now: float, numbers: Numbers) -> str:
        each = (now - self._start) / max(1, self._done - self._before)
        rest = f", {duration(each * (self._total - self._done))} left" if self._done < self._total else ""
        shown = f": {_words(numbers, ' ', ', ')}" if numbers else ""
        share = 100 * self._done // max(1, self._total)
        return f"{self._title}: {self._done} of {self._total} ({share} %), {duration(each)} each{rest}{shown}"


def _words(numbers: Numbers, between: str, after: str = " ") -> str:
    return after.join(f"{name}{between}{value:.3g}" for name, value in numbers.items())


def duration(seconds: float) -> str:
    """Two digits or the two largest units: `0.42 s`, `42 s`, `3 min`, `1 h 58 min`, `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Bytes in the unit that has one to three digits before the point: `340 MB`, `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """One line to the person who waits."""
    if _speaks():
        bars = {} if (sys.stdout.encoding or "").lower().startswith("utf") else str.maketrans("▁▂▃▄▅▆▇█", ".:-=+*#@")
        with tqdm.external_write_mode():  # a bar steps aside
            print(text.translate(bars), flush=True)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the terminal; text is shown as it is, never as markup."""
    cells = list(rows)
    if not _speaks() or not cells:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_lines=True, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*(Text(_clipped(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _clipped(text: str, length: int = 300) -> str:
    text = text.strip()
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def metrics_line(metrics: Mapping[str, float]) -> str:
    """`eval_accuracy 0.93, eval_loss 0.21`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


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
