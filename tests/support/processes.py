"""Processes that tests look for and wait for."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def alive(word: str) -> list[str]:
    """Command lines with `word` in them, of processes that are no zombies."""
    command_lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_text().replace("\0", " ")
            if word in line and (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                command_lines.append(line)
    return command_lines


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
