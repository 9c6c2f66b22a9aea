"""Files that outlive a power cut, and that the user's umask gives to those who may read them.

A file system holds what was written in memory for half a minute, and may write a file's name down before its content.
What something else counts on, a checkpoint on its files, the end of a stage on its model, is therefore flushed first:
the content of each file, then the directory that names it.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which names a directory has."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems flush no directory
            raise
    finally:
        os.close(number)


def make_directory(path: Path) -> None:
    """With its parents, whose names the disk then holds too."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write atomically: a reader, and the time after a power cut, sees the old file or the whole new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def write_json(path: Path, value: Any) -> None:
    """The same of a JSON value."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def remove(path: Path) -> None:
    """Remove a file, if it is there, for good."""
    if path.exists():
        path.unlink()
        flush(path.parent)


def save_tensors(tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """As safetensors, with the mode that every new file has: the library writes what its owner alone may read."""
    from safetensors.torch import save_file  # here, because it imports torch

    save_file(tensors, path, metadata)
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def complete(folder: Path) -> None:
    """Have the disk hold a whole directory, and give its files and folders the modes that new ones have."""
    mask = _umask()
    for path in [*folder.rglob("*"), folder]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        flush(path)


@contextlib.contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A temporary sibling to write into; it becomes `directory` when the block ends well, and is removed otherwise.

    What `directory` was before is there until the new one is.
    """
    staging, before = directory.with_name(f".tmp-{directory.name}"), _before(directory)
    recover(directory)
    shutil.rmtree(staging, ignore_errors=True)
    make_directory(directory.parent)
    staging.mkdir()
    try:
        yield staging
        complete(staging)
        if directory.exists():
            os.rename(directory, before)
        os.rename(staging, directory)
        flush(directory.parent)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover(directory: Path) -> None:
    """Undo, or end, an exchange of `directory` that was cut off."""
    before = _before(directory)
    if before.exists() and not directory.exists():
        os.rename(before, directory)
    shutil.rmtree(before, ignore_errors=True)


def _before(directory: Path) -> Path:
    return directory.with_name(f".old-{directory.name}")
