"""Errors that end a program, and the lines that they print. Torch-free."""

import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rlhf import private_folders, streams

THREADS_S = 30.0
"""seconds that the end of a program waits for threads, which the user's code may have left"""


MISTAKE_FILE = "RLHF_MISTAKE_FILE"
"""environment variable of the processes that a function of rlhf.chain.api starts: where a mistake's line is written"""


class UserError(ValueError):
    """A mistake that the user can correct. The message is one line: where, what, got, expected, cure."""

    def __str__(self) -> str:
        """With control characters escaped, because a message may quote data, a template or a file's name."""
        return streams.printable(super().__str__())


def system_error_line(error: OSError) -> str | None:
    """One line for a full disk, missing permissions or too many open files; None for other errors."""
    cures = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space there")
    cures |= dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)")
    cures[errno.ENAMETOOLONG] = "shorten the path"
    cures |= dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.ELOOP), "correct that")
    cures |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE), "correct that")
    if error.errno not in cures:
        return None
    name = streams.printable(str(error.filename or "a file"))
    return f"{name}: {error.strerror}; {cures[error.errno]}, and run the same command again"


def run_as_user(main: Callable[[], int | None]) -> int:
    """Call `main()` and return the exit code of the program.

    A user's mistake or an error of the system becomes one line on stderr and exit code 2, Ctrl-C exit code 130. A
    closed pipe, as with `| head`, is no error; stdout on a full disk gives one line and code 2. With RLHF_DEBUG in the
    environment, the traceback of an exception in the user's own code is printed before the line.
    """
    streams.ignore_broken_streams(report=False)
    try:
        private_folders.use()
        try:
            code = int(main() or 0)
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise
            code = 0
        stdout_error = streams.unreported_stdout_error()
        if stdout_error is None or isinstance(stdout_error, BrokenPipeError):  # a closed pipe is no error
            return code
        print(f"error: stdout: {stdout_error.strerror}; the output is incomplete", file=sys.stderr)
        return code or 2
    except UserError as error:
        if error.__cause__ is not None and os.environ.get("RLHF_DEBUG"):
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        if os.path.isfile(file := os.environ.get(MISTAKE_FILE, "")):  # on another host there is none
            Path(file).write_text(str(error), encoding="utf-8")
        tell_torchrun(f"error: {error}")
        return 2
    except OSError as error:
        if system_error_line(error) is None:
            raise
        print(f"error: {system_error_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def tell_torchrun(message: str) -> None:
    """torchrun, if it has started this process, prints the message at the end of its own report."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": details}), encoding="utf-8")


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """`run_as_user`, and the end of the process."""
    code = 1
    try:
        code = run_as_user(main)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
        raise
    finally:
        end_within(THREADS_S, code)
    raise SystemExit(code)


def end_within(seconds: float, code: int) -> None:
    """From now on Ctrl-C ends the process at once: Python's handler would raise in the middle of a clean-up, whose exit
    code stays 0 or becomes 1. A process whose threads do not end by themselves ends after `seconds`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def wait() -> None:
        time.sleep(seconds)
        names = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
        print(f"ended without waiting for threads that do not end: {names}", file=sys.stderr, flush=True)
        os._exit(code)

    threading.Thread(target=wait, daemon=True).start()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error of Python, torch or a GPU."""
    torch_message = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and torch_message)
