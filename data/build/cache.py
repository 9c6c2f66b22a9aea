"""A directory for each set of tokenised rows, named for all that it depends on; it appears whole or not at all."""

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
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from rlhf import console
from rlhf.errors import UserError
from rlhf.shipped import ROOT

REPORT = "report.json"
CODE = ("data/read", "data/sources", "data/build", "data/dataset.py", "rlhf/text", "rlhf/types.py")
"""What decides on ids; an edit elsewhere, in the preview say, leaves the sets as they are."""
LIBRARIES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")


def cache_root(option: str | None) -> Path:
    """Where the sets lie. Raises: UserError if nothing can be written there."""
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


def key(**parts: Any) -> str:
    """A digest of everything a set depends on."""
    whole = json.dumps({**parts, "code": code_digest()}, sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """Of the code that makes a set, and of the libraries that render, tokenise and store."""
    versions = " ".join(importlib.metadata.version(name) for name in LIBRARIES)
    digest = hashlib.sha256(versions.encode())
    for path in (ROOT / name for name in CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what decides how a text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = [str(tokenizer.chat_template), tokenizer.bos_token_id, tokenizer.eos_token_id, type(tokenizer).__name__]
    return hashlib.sha256((whole + json.dumps(special)).encode()).hexdigest()


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path | None]:
    """A temporary directory that becomes `folder` when the block ends well; None if `folder` is there already.

    Several processes may come at once: one builds, the others wait outside any collective and then find it. Where
    file locks do not work (some network file systems) each builds, and the first to end wins. The lock is the process's
    own (POSIX), so the kernel frees it when the builder dies, whatever children it leaves.
    """
    root = folder.parent
    with (root / f"{folder.name}.lock").open("w") as lock:
        _lock(lock)
        if is_whole(folder):
            yield None
            return
        _sweep(root)
        staging = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name[:8]}-", dir=root))
        try:
            yield staging
            if folder.exists() and not is_whole(folder):
                shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # it appeared meanwhile
                staging.rename(folder)
            assert is_whole(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{root}: cannot be written ({error}); make room, or name another with --data-cache"
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


def _sweep(root: Path) -> None:
    """Remove what builders left behind that died more than a day ago."""
    for left in root.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Whether a set is there; its report is written last and the directory appears at once."""
    return (folder / REPORT).is_file()
