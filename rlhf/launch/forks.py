"""A stage as a fork of the chain's process, which has imported what the stage needs. Torch-free.

A fork has the memory of its parent but only one of its threads. A library whose threads are gone waits for them for
ever, so a process forks only while it has no other threads than those that imports start, which are those of libraries
that survive it (OpenBLAS's and jemalloc's, pyarrow's allocator). After any parallel computation or tokenisation the
stage starts as a new program.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from rlhf.errors import THREADS_S, end_within

_TASKS = Path("/proc/self/task")
_of_imports: ContextVar[frozenset[str]] = ContextVar("_of_imports", default=frozenset())
"""the threads that imports have started"""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, new threads are those of imported libraries."""
    before = _threads()
    yield
    _of_imports.set(_of_imports.get() | _threads() - before)


def _threads() -> set[str]:
    """The threads of this process beside the first one."""
    return set(os.listdir(_TASKS)) - {str(os.getpid())} if _TASKS.is_dir() else set()


def possible() -> bool:
    """Whether this process can become a stage by a fork: it has imported torch, has no thread that would be missed, and
    sees no GPU, whose driver does not survive a fork. Only on Linux."""
    torch = sys.modules.get("torch")
    return _TASKS.is_dir() and _threads() <= _of_imports.get() and torch is not None and torch.cuda.device_count() == 0


class Fork:
    """A child process that runs the program of a module, in its own session; as much of Popen as a group needs."""

    def __init__(self, module: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes write what is buffered
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        gc.freeze()  # objects that are not visited share their memory
        atexit.register(gc.unfreeze)  # triton reports what is left at the end, and frozen objects are
        self._code: int | None = None
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become(module, argv, environment, signals)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    def poll(self) -> int | None:
        """The exit code, below 0 a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _become(module: str, argv: Sequence[str], environment: Mapping[str, str], signals: set[int]) -> NoReturn:
    """In the child: run the program with these signals blocked, and end the process. No `finally` block and no function
    of atexit that belongs to the parent runs here."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        atexit._clear()
        paths = environment["PYTHONPATH"].split(os.pathsep)
        own = sys.path[0 if sys.flags.safe_path else 1 :]  # without -P the first one is the directory of the script
        sys.path[:] = dict.fromkeys([*paths, *own])
        code = _run(module, argv)
        end_within(THREADS_S, code)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(module: str, argv: Sequence[str]) -> int:
    """Call the program of `python -m module` with these words. Returns the exit code."""
    try:
        return int(importlib.import_module(f"{module}.__main__").main(argv))
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return leaving.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
