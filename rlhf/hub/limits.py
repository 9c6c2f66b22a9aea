"""Work on what a stranger made, tried first in a forked process that may take so much CPU time and memory.

The kernel keeps the limits, so nothing that the process runs can pass them: neither a loop in a library's C or Rust nor
code that catches every exception. The process that forks has no limit, no tracer and no signal handler of this.
"""

import contextlib
import faulthandler
import gc
import math
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from rlhf.errors import UserError
from rlhf.launch.launcher import end_with_parent

MAX_BYTES = 1 << 30
WALL_S = 120.0
"""for a process that gets no CPU time, or waits for something that never comes"""
GRACE_S = 0.5
"""of CPU time from the Late to the kill"""
DONE, MISTAKE, CRASH, WAITING = b"=", b"!", b"?", b"."
"""what the process says first: that the job is done, or a UserError follows, or a traceback; that WALL_S is over"""


class Late(BaseException):
    """The CPU time is up. No Exception, which libraries catch; raised every tenth of a second until the job ends."""


def run_limited(job: Callable[[], object], what: str, seconds: float, more: int = MAX_BYTES) -> None:
    """Run `job` in a forked process for `seconds` of CPU time at most, with `more` bytes than this process has.

    What it does there is lost. Raises: UserError of the job, or that `what` takes more; RuntimeError for another error.
    """
    ours, theirs = os.pipe()
    parent = os.getpid()
    with uninterrupted():
        child = os.fork()
        if child == 0:
            _work(job, theirs, parent, seconds, more)
    os.close(theirs)
    try:
        told = _read(ours)
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
    text = told[1:].decode(errors="replace")
    if told[:1] == CRASH:
        raise RuntimeError(f"{what}: {text}")
    if told[:1] == MISTAKE:
        raise UserError(text)
    if told != DONE:
        late = used.ru_utime + used.ru_stime >= seconds or told == WAITING
        got = "work without an end" if late else "a lack of memory"
        raise UserError(f"{what}: got {got}, expected at most {seconds:g} seconds and {more >> 20} MiB")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block ends: Python drops a KeyboardInterrupt that it raises between a fork and its next
    line, and a child that has just been forked would write a traceback."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        signal.raise_signal(signal.SIGINT)


def leave_signals_to(parent: int) -> None:
    """In a process forked by `parent`: Ctrl-C is for the parent, which ends this one; so is this one's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)


def _read(ours: int) -> bytes:
    """All that the process writes until it ends, or WAITING."""
    told = b""
    while select.select([ours], [], [], WALL_S)[0]:
        piece = os.read(ours, 1 << 16)
        if not piece:
            return told
        told += piece
    return WAITING


def _work(job: Callable[[], object], theirs: int, parent: int, seconds: float, more: int) -> NoReturn:
    try:
        faulthandler.disable()
        gc.disable()  # what the parent has dropped is not to be ended twice
        leave_signals_to(parent)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust writes a traceback before it raises
        told = b""
        try:
            _limit(seconds, more)
            job()
            told = DONE
        except UserError as mistake:
            told = MISTAKE + str(mistake).encode()
        except (Late, MemoryError):
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            crash = sys.exc_info()[0] is not None
            os.write(theirs, CRASH + traceback.format_exc().encode() if crash else told)
    finally:
        os._exit(0)  # nothing of the parent's runs here: no `finally`, no atexit


def _limit(seconds: float, more: int) -> None:
    """Linux keeps both limits; a system without /proc or RLIMIT_AS only that of time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    killed_at = math.ceil(seconds + GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (killed_at, killed_at))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)


def _late(*_: object) -> NoReturn:
    raise Late
