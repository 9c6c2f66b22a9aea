"""Errors that end a program, and what a person reads of them. Torch-free."""

import errno
import os
import sys
import traceback
from typing import Any

from rlhf import streams


class UserError(ValueError):
    """A mistake the user can mend. The message is one line: where, what, got, expected, cure."""


def of_the_system(error: OSError) -> str | None:
    """What the machine refuses (room, rights, descriptors), on one line; None for mistakes of ours."""
    cures = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there")
    cures |= dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)")
    cures |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE), "mend that")
    if error.errno not in cures:
        return None
    return f"{error.filename or 'a file'}: {error.strerror}; {cures[error.errno]}, and run the same command again"


def run_as_user(main: Any) -> int:
    """Call `main()`; a user's mistake, or what the machine refuses, becomes one line on stderr and exit code 2, Ctrl-C
    130.

    A pipe that is closed, as by `| head`, ends it in silence with code 0; stdout on a full disk is a line and code 2.
    With RLHF_DEBUG in the environment, the traceback of what a user's own code has raised comes before the line.
    """
    streams.outlive_readers(tell=False)
    try:
        try:
            code = int(main() or 0)
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise
            code = 0
        lost = streams.lost_stdout()
        if lost is None or isinstance(lost, BrokenPipeError):  # `| head` has what it wants
            return code
        print(f"error: stdout: {lost.strerror}; not all of it is there", file=sys.stderr)
        return code or 2
    except UserError as error:
        if error.__cause__ is not None and os.environ.get("RLHF_DEBUG"):
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if of_the_system(error) is None:
            raise
        print(f"error: {of_the_system(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def ran_out(error: BaseException) -> bool:
    """Whether this is Python's, torch's or a GPU's lack of memory."""
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch)
