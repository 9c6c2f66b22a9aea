"""stdout and stderr whose reader has gone, whose disk is full, or which were never open.

A run may take days. A closed pipe (`| head`), a closed terminal or a log on a full disk must not end it. Torch-free.
"""

import io
import os
import re
import sys
from typing import Any, TextIO

NAMES = ("stdout", "stderr")
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
"""characters that could move a terminal's cursor or change its colours: all controls but line break and tab"""


def printable(text: str) -> str:
    """The text with each control character as its escape, `\\x1b`: a terminal would obey it, and models, data files and
    templates may contain any."""
    return _CONTROL.sub(lambda character: f"\\x{ord(character[0]):02x}", text.replace("\r\n", "\n"))


def ignore_broken_streams(report: bool = True) -> None:
    """From now on an error in writing to stdout or stderr does not end the program; further output is dropped.

    report: whether an error of stdout is printed on stderr at once; else `unreported_stdout_error` returns it
    Characters that the stream cannot encode become '?'. The replaced streams of tests do not change.
    """
    for name in NAMES:
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (it stays open)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if stream is getattr(sys, f"__{name}__"):
                raw = _RobustFile(stream.fileno(), "w", closefd=False)
                raw.name = name
                # write_through: PYTHONUNBUFFERED asks for output at once, which a line here gets at its end
                buffered, lines = io.BufferedWriter(raw), stream.line_buffering or stream.write_through
                setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, "replace", line_buffering=lines))
        for raw in _raw_files(getattr(sys, name)):
            raw.report_error = report


def unreported_stdout_error() -> OSError | None:
    """The error for which output on stdout was dropped, if it was not reported."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return next((raw.error for raw in _raw_files(sys.stdout) if not raw.report_error), None)


class _RobustFile(io.FileIO):
    """A file that becomes /dev/null when writing to it fails."""

    error: OSError | None = None
    report_error = True

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            self.error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.report_error and self.name == "stdout":
                message = f"stdout: {error.strerror}; its further output is dropped, and the run continues"
                print(message, file=sys.stderr, flush=True)
            return len(data)


def _raw_files(stream: object) -> list[_RobustFile]:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return [raw] if isinstance(raw, _RobustFile) else []
