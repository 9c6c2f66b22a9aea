"""Runs a job on untrusted input in a forked process with limited CPU time and memory.

The kernel enforces the limits, so the process cannot exceed them: neither a loop in a library's C or Rust code, nor
code that catches every exception. The parent process gets no limit, tracer or signal handler.
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
"""seconds of real time, for a process that gets no CPU time or waits forever"""
GRACE_S = 0.5
"""seconds of CPU time between TimeUp and the kill"""
DONE, MISTAKE, CRASH, WAITING = b"=", b"!", b"?", b"."
"""first byte of the process's message: the job is done; a UserError follows; a traceback follows; WALL_S is over"""


class TimeUp(BaseException):
    """The CPU time is used up. Raised every tenth of a second until the job ends. Not an Exception: libraries catch
    those."""


def run_limited(job: Callable[[], object], what: str, seconds: float, extra_bytes: int = MAX_BYTES) -> None:
    """Run `job` in a forked process with at most `seconds` of CPU time and `extra_bytes` more than this process has.

    Its effects on that process are lost. Raises: the job's UserError, or one that names `what` for an exceeded limit;
    RuntimeError for another error.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    with uninterrupted():
        child = os.fork()
        if child == 0:
            _work(job, write_end, parent, seconds, extra_bytes)
    os.close(write_end)
    try:
        message = _read(read_end)
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
    text = message[1:].decode(errors="replace")
    if message[:1] == CRASH:
        raise RuntimeError(f"{what}: {text}")
    if message[:1] == MISTAKE:
        raise UserError(text)
    if message != DONE:
        timed_out = usage.ru_utime + usage.ru_stime >= seconds or message == WAITING
        problem = "work without an end" if timed_out else "a lack of memory"
        raise UserError(f"{what}: got {problem}, expected at most {seconds:g} seconds and {extra_bytes >> 20} MiB")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Python loses a KeyboardInterrupt that it raises between a fork and the next
    line, and a child that has just been forked would print a traceback."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        signal.raise_signal(signal.SIGINT)


def leave_signals_to(parent: int) -> None:
    """In a process forked by `parent`: ignore Ctrl-C, which the parent handles, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)


def _read(read_end: int) -> bytes:
    """Everything that the process writes until it ends; WAITING if it writes nothing for WALL_S seconds."""
    message = b""
    while select.select([read_end], [], [], WALL_S)[0]:
        chunk = os.read(read_end, 1 << 16)
        if not chunk:
            return message
        message += chunk
    return WAITING


def _work(job: Callable[[], object], write_end: int, parent: int, seconds: float, extra_bytes: int) -> NoReturn:
    try:
        faulthandler.disable()
        gc.disable()  # finalizers of the parent's objects must not run twice
        leave_signals_to(parent)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust writes a traceback before it raises
        message = b""
        try:
            _limit(seconds, extra_bytes)
            job()
            message = DONE
        except UserError as mistake:
            message = MISTAKE + str(mistake).encode()
        except (TimeUp, MemoryError):
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            crash = sys.exc_info()[0] is not None
            os.write(write_end, CRASH + traceback.format_exc().encode() if crash else message)
    finally:
        os._exit(0)  # the parent's `finally` blocks and atexit functions must not run here


def _limit(seconds: float, extra_bytes: int) -> None:
    """Set both limits; without /proc or RLIMIT_AS only that of time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    killed_at = math.ceil(seconds + GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (killed_at, killed_at))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, _raise_time_up)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)


def _raise_time_up(*_: object) -> NoReturn:
    raise TimeUp
