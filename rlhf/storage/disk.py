"""Files that survive a power cut, with the access modes of the user's umask.

A file system keeps written data in memory for up to half a minute, and may store a file's name before its content.
So what other data depends on is flushed first (the files before the checkpoint that lists them, the model before the
manifest of its stage): the content of each file, then the directory that has its name.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config import Tree

if TYPE_CHECKING:
    from torch import Tensor


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot flush a directory
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and flush their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write atomically: a reader sees the old file or the whole new one, also after a power cut."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
    except OSError as error:  # what write and fsync raise names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.replace(temporary, path)
    flush(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write a JSON value atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def json_value(value: object) -> Any:
    """The value with None for infinity and NaN, which JSON does not have."""
    return with_leaves(lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf, value)


def with_leaves(change: Callable[[Any], object], value: object) -> Any:
    """A JSON value with `change` of each text, number, truth value and null in it."""
    if isinstance(value, Mapping):
        return {name: with_leaves(change, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_leaves(change, inner) for inner in value]
    return change(value)


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises: ValueError, OSError."""
    return json.loads(path.read_text(encoding="utf-8"))


def json_lines(path: Path) -> list[Tree]:
    """The objects of a file with one on each line. Other lines are left out: one that a crash has cut short, or that a
    file system has filled with zeros after a power cut."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def remove(path: Path) -> None:
    """Remove a file if it exists; the removal is flushed to the disk."""
    if path.exists():
        path.unlink()
        flush(path.parent)


def save_tensors(tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the access mode of the umask: the library's own mode lets only the owner read."""
    from safetensors.torch import save_file  # here because it imports torch

    save_file(tensors, path, metadata)
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Linux tells it. Elsewhere it is known by setting it, which a thread that makes a file just then would notice."""
    with contextlib.suppress(OSError):
        lines = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        if lines:
            return int(lines[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def flush_tree(folder: Path) -> None:
    """Flush a whole directory to the disk, and give its files and folders the access modes of the umask."""
    mask = _umask()
    for path in [*folder.rglob("*"), folder]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        flush(path)


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory to write into. It replaces `directory` at the end of the block, and is removed on an error.

    The old directory stays until the new one is complete.
    """
    staging, old = directory.with_name(f".tmp-{directory.name}"), _old_path(directory)
    recover(directory)
    shutil.rmtree(staging, ignore_errors=True)
    make_directory(directory.parent)
    staging.mkdir()
    try:
        yield staging
        flush_tree(staging)
        if directory.exists():
            os.rename(directory, old)
        os.rename(staging, directory)
        flush(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover(directory: Path) -> None:
    """Undo or finish a replacement of `directory` that was interrupted."""
    old = _old_path(directory)
    if old.exists() and not directory.exists():
        os.rename(old, directory)
    shutil.rmtree(old, ignore_errors=True)


def _old_path(directory: Path) -> Path:
    return directory.with_name(f".old-{directory.name}")
