"""Words for a person who waits: what is being done, and how far a loop is. They go to stderr, from rank 0 alone.

On a terminal a loop has a bar. In a log, where a bar would be one line without end, it has a line with date and time
at its first step, then every EVERY_S seconds, and at its last step. Torch-free, so that the first line comes at once.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
    if os.environ.get("RANK", "0") != "0":
        return
    stamp = "" if sys.stderr.isatty() else time.strftime("%Y-%m-%d %H:%M:%S ")
    with tqdm.external_write_mode(file=sys.stderr):
        print(f"{stamp}{text}", file=sys.stderr, flush=True)


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
    hidden = os.environ.get("RANK", "0") != "0"
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
