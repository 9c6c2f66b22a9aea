"""The files of a run that grow line by line: how long they were at a checkpoint, and cut back to that."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf import console
from rlhf.storage import disk


def sizes(directory: Path, patterns: Sequence[str]) -> dict[str, int]:
    """The bytes of each file of these patterns, by name."""
    return {path.name: path.stat().st_size for path in _logs(directory, patterns)}


def sync(directory: Path, patterns: Sequence[str]) -> None:
    """Have the disk hold them."""
    for path in (*_logs(directory, patterns), directory):
        disk.flush(path)


def _logs(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(directory.glob(pattern))]


def cut(directory: Path, patterns: Sequence[str], known: Mapping[str, int]) -> None:
    """Take away what was written after a checkpoint that counted these `known` bytes, and say where some of them are
    lost; a log that it does not know goes."""
    for path in _logs(directory, patterns):
        if path.name not in known:
            path.unlink()
        elif path.stat().st_size > known[path.name]:
            os.truncate(path, known[path.name])
    for name, size in known.items():
        path = directory / name
        left = path.stat().st_size if path.is_file() else 0
        if left < size:
            _end_whole(path)
            lost = f"got {left} bytes, expected {size} of the checkpoint; its last rows are lost"
            console.say(f"warning: {path}: {lost}")


def _end_whole(path: Path) -> None:
    """Take away a last line that was cut off."""
    if path.is_file():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
