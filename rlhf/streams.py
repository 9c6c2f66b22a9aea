"""stdout and stderr when nobody reads them any more, when the disk behind them is full, or when they never were open.

A run may take days, and what it says is for a person who waits: `| head`, a terminal that is gone or a log on a full
disk are no reason to lose it. Torch-free.
"""

import io
import os
import sys
from typing import Any

NAMES = ("stdout", "stderr")


def outlive_readers(tell: bool = True) -> None:
    """From here on a stream that breaks ends nothing: what else is written to it is dropped.

    With `tell`, that of stdout is told on stderr at once; without, `lost_stdout` knows. Text that a terminal cannot
    show becomes '?'. Streams of tests stay as they are.
    """
    for name in NAMES:
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (it stays open)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if stream is getattr(sys, f"__{name}__"):
                raw = _Lasting(stream.fileno(), "w", closefd=False)
                raw.name = name
                lines = stream.line_buffering
                lasting = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=lines)
                setattr(sys, name, lasting)
        for raw in _raw(getattr(sys, name)):
            raw.tell_loss = tell


def lost_stdout() -> OSError | None:
    """Why something of stdout was dropped, if nobody was told."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return next((raw.error for raw in _raw(sys.stdout) if not raw.tell_loss), None)


class _Lasting(io.FileIO):
    """A file that becomes /dev/null when writing to it fails."""

    error: OSError | None = None
    tell_loss = True

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            self.error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.tell_loss and self.name == "stdout":
                told = f"stdout: {error.strerror}; nothing more is written there, and the run goes on"
                print(told, file=sys.stderr, flush=True)
            return len(data)


def _raw(stream: Any) -> list[_Lasting]:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return [raw] if isinstance(raw, _Lasting) else []
