"""The files of a run that grow line by line: how long they were at a checkpoint, and cut back to that."""

import os
from collections.abc import Mapping
from pathlib import Path

LOGS = ("metrics.jsonl", "samples.jsonl", "chosen.jsonl", "rollouts-*.jsonl")


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of each, by name."""
    return {path.name: path.stat().st_size for path in _logs(directory)}


def _logs(directory: Path) -> list[Path]:
    return [path for pattern in LOGS for path in sorted(directory.glob(pattern))]


def cut(directory: Path, known: Mapping[str, int]) -> None:
    """Take away what was written after a checkpoint that has these `sizes`; what it does not know goes."""
    for path in _logs(directory):
        if path.name not in known:
            path.unlink()
        elif path.stat().st_size > known[path.name]:
            os.truncate(path, known[path.name])
