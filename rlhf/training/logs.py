"""The files of a run that grow line by line: their lengths at a checkpoint, to which they are truncated."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf import console
from rlhf.storage import disk


def sizes(directory: Path, patterns: Sequence[str]) -> dict[str, int]:
    """The size in bytes of each file that matches a pattern, by name."""
    return {path.name: path.stat().st_size for path in _logs(directory, patterns)}


def sync(directory: Path, patterns: Sequence[str]) -> None:
    """Flush them to the disk."""
    for path in (*_logs(directory, patterns), directory):
        disk.flush(path)


def _logs(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(directory.glob(pattern))]


def cut(directory: Path, patterns: Sequence[str], sizes_then: Mapping[str, int]) -> None:
    """Truncate each log to its size at a checkpoint, and warn if a log is shorter; delete logs that are newer.

    sizes_then: bytes of each log at the checkpoint, by name
    """
    for path in _logs(directory, patterns):
        if path.name not in sizes_then:
            path.unlink()
        elif path.stat().st_size > sizes_then[path.name]:
            os.truncate(path, sizes_then[path.name])
    for name, size in sizes_then.items():
        path = directory / name
        size_now = path.stat().st_size if path.is_file() else 0
        if size_now < size:
            _remove_partial_line(path)
            lost = f"got {size_now} bytes, expected {size} of the checkpoint; its last rows are lost"
            console.say(f"warning: {path}: {lost}")


def _remove_partial_line(path: Path) -> None:
    """Remove an incomplete last line."""
    if path.is_file():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
