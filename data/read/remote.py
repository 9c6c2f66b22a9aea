"""Data files in object stores and on web servers (`s3://`, `gs://`, `https://`), read row by row through fsspec.

fsspec needs one package for each kind of store, which also finds the credentials and repeats failed requests. No file
is copied to the disk; only the tokenised rows are stored.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rlhf.errors import UserError

if TYPE_CHECKING:
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

URL = re.compile(r"(?:s3|gs|az|abfs|https|memory)://(?:(?!::).)+", re.DOTALL)
"""fsspec also reads archives, local caches and chains of these (`a::b`), which are refused; `memory` is for tests"""


def is_remote(path: str) -> bool:
    """Whether `path` is a URL of a kind that is read."""
    return URL.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a store, with the members of a local path that the readers use."""

    url: str
    store: "AbstractFileSystem"

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path: without the query of a web address, such as a token."""
        path = re.split("[?#]", self.url)[0] if self.url.startswith("https:") else self.url
        return PurePosixPath(path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self) -> "AbstractBufferedFile":
        """Its bytes."""
        return self.store.open(self.url, "rb")

    def digest(self) -> bytes:
        """Of the store's metadata: size, ETag or modification time. Raises: UserError if the file cannot be read."""
        with refuse_failures(self):
            metadata = self.store.info(self.url)
        return hashlib.sha256(repr(sorted(metadata.items(), key=repr)).encode()).digest()


DataFile = Path | RemoteFile


def find_files(url: str) -> list[RemoteFile]:
    """The file at a URL, or the files that a pattern matches, sorted.

    Raises: UserError if the package for this kind of store is missing, a request fails, or there is no such file.
    """
    import fsspec  # a tenth of a second, needed here only

    with refuse_failures(url, ImportError, ValueError):
        store, path = fsspec.core.url_to_fs(url)
        if "*" in url:
            return [RemoteFile(store.unstrip_protocol(name), store) for name in sorted(store.glob(path))]
    file = RemoteFile(url, store)
    file.digest()
    return [file]


@contextlib.contextmanager
def refuse_failures(name: object, *errors: type[Exception]) -> Iterator[None]:
    """Raises: UserError if reading a file of a disk or a store fails inside the block, or for any of `errors`.

    name: what is read
    """
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except UserError:
        raise
    except failures as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{name}: cannot be read: {reason}") from None
