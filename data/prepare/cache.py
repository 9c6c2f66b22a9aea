"""The cache of tokenised rows: one directory per entry, named by a digest of everything that determines its content.

A directory is complete from the moment that it appears.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.errors import UserError
from rlhf.shipped import ROOT
from rlhf.text.tokenizer import digest_without_template

REPORT = "report.json"
CODE_PATHS = ("data/read", "data/sources", "data/prepare", "data/dataset.py", "rlhf/text", "rlhf/types.py")
"""code that determines token ids; a change of other code, such as the preview, leaves the cache valid"""
LIBRARIES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")


def cache_root(option: str | None) -> Path:
    """The directory of the cache. Raises: UserError if it cannot be written."""
    root = Path(option or os.environ.get("RLHF_CACHE") or "~/.cache/rlhf-pipeline").expanduser()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows may be private
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise UserError(
            f"{root}: cannot be written ({error.strerror}); name another directory with --data-cache"
        ) from None
    return root


def cache_key(**parts: object) -> str:
    """The name of an entry: a digest of `parts`, the code and the library versions."""
    text = json.dumps({**parts, "code": code_digest()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """A digest of the code and the library versions that determine token ids."""
    versions = " ".join(importlib.metadata.version(name) for name in LIBRARIES)
    digest = hashlib.sha256(versions.encode())
    for path in (ROOT / name for name in CODE_PATHS):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that determines how the tokenizer turns text into ids."""
    special = [str(tokenizer.chat_template), tokenizer.bos_token_id, tokenizer.eos_token_id, type(tokenizer).__name__]
    return hashlib.sha256((digest_without_template(tokenizer) + json.dumps(special)).encode()).hexdigest()


@contextlib.contextmanager
def build_entry(folder: Path) -> Iterator[Path | None]:
    """A temporary directory that is renamed to `folder` when the block succeeds; None if `folder` exists already.

    If several processes ask for one entry, one builds it and the others wait, outside any collective. Without working
    file locks (some network file systems) each builds it, and the first to finish wins. It is a POSIX lock, which
    belongs to the process: the kernel releases it when the builder dies, even if child processes survive.
    """
    root = folder.parent
    with (root / f"{folder.name}.lock").open("w") as lock:
        _lock(lock)
        if is_complete(folder):
            yield None
            return
        _remove_stale(root)
        staging = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name[:8]}-", dir=root))
        try:
            yield staging
            if folder.exists() and not is_complete(folder):
                shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # another process was faster
                staging.rename(folder)
            assert is_complete(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{root}: cannot be written ({error}); free space, or name another with --data-cache"
            ) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _lock(file: TextIO) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.say("waiting for another process that tokenises the same rows")
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError:
        return  # a file system without locks


def _remove_stale(root: Path) -> None:
    """Remove temporary directories of processes that died more than a day ago."""
    for folder in root.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 86400:
                shutil.rmtree(folder, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether the entry exists and is complete. Its report is written last."""
    return (folder / REPORT).is_file()
