"""Data files in object stores and on web servers (`s3://`, `gs://`, `https://`), read row by row through fsspec.

fsspec needs one package for each kind of store, which also finds the credentials. No file is copied to the disk; only
the tokenised rows are stored.
"""

import hashlib
import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rlhf.errors import UserError

URL = re.compile(r"(?:s3|gs|az|abfs|https|memory)://(?:(?!::).)+", re.DOTALL)
"""fsspec also reads archives, local caches and chains of these (`a::b`), which are refused; `memory` is for tests"""
TRIES, WAIT_S = 4, 1.0
"""the waits between them double: 1, 2 and 4 s"""
METADATA_FILES = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""files that `datasets` writes beside the data"""
HELD_OUT = re.compile(r"(?:^|[-._ 0-9/])(?:test|testing|eval|evaluation|valid|validation|val|dev)(?:[-._ 0-9/]|$)")
"""names of files for evaluation, as `datasets` knows them"""
STORE_ERRORS = (("aiohttp", "ClientError"), ("botocore.exceptions", "BotoCoreError"), ("gcsfs.retry", "HttpError"))
"""errors of a request beside OSError: the module, which need not be installed, and the exception"""
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Whether `path` is a URL of a kind that is read."""
    return URL.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a store, with the members of a local path that the readers use."""

    url: str
    store: Any
    """fsspec's AbstractFileSystem"""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path: without the query of a web address, such as a token."""
        path = self.url.partition("?")[0].partition("#")[0] if self.url.startswith("https:") else self.url
        return PurePosixPath(path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self) -> io.RawIOBase:
        """Its bytes. Raises: OSError if a request fails TRIES times."""
        return _ReopeningFile(self)

    def digest(self) -> bytes:
        """Of the store's metadata: size, ETag or modification time. Raises: UserError if the file cannot be read."""
        metadata = _request(self.url, lambda: self.store.info(self.path))
        return hashlib.sha256(repr(sorted(metadata.items(), key=repr)).encode()).digest()

    @property
    def path(self) -> str:
        """The name of the file in the store."""
        return str(self.store._strip_protocol(self.url))


DataFile = Path | RemoteFile


def find_files(url: str, is_data: Callable[[RemoteFile], bool]) -> list[RemoteFile]:
    """The data file at a URL, or the data files that a pattern matches or that lie in a directory, sorted.

    Raises: UserError if the package for this kind of store is missing, requests fail, or there is no data file.
    """
    store = _open_store(url)
    file = RemoteFile(url, store)
    if "*" not in url and is_data(file):
        file.digest()
        return [file]
    names = _request(url, lambda: store.glob(file.path) if "*" in url else store.find(file.path))
    files = [RemoteFile(store.unstrip_protocol(name), store) for name in sorted(names)]
    files = [file for file in files if is_data(file)]
    if "*" not in url:
        files = _of_directory(url, files, file.path)
    if not files:
        raise UserError(f"{url}: no such data file")
    return files


def _of_directory(url: str, files: Sequence[RemoteFile], root: str) -> list[RemoteFile]:
    """The files of a directory without hidden ones, those that `datasets` writes beside data, and .txt files beside
    others.

    Raises: UserError for names of several splits, which are found in local directories only.
    """
    names = {file: file.path.removeprefix(root).strip("/") for file in files}
    visible = {file: name for file, name in names.items() if not re.search(r"(^|/)\.", name)}
    visible = {file: name for file, name in visible.items() if PurePosixPath(name).name not in METADATA_FILES}
    data = [file for file, name in visible.items() if not re.search(r"\.txt(\.\w+)?$", name)] or list(visible)
    held_out = [visible[file] for file in data if HELD_OUT.search(visible[file])]
    if held_out and len(held_out) < len(data):
        raise UserError(
            f"{url}: got '{held_out[0]}' beside files to train on; the splits of a directory at an address are not "
            f"known: name the files by a pattern, as {url.rstrip('/')}/train*"
        )
    return data


def _open_store(url: str) -> Any:
    import fsspec  # a tenth of a second, needed here only

    try:
        return fsspec.core.url_to_fs(url)[0]
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{url}: cannot be read: {reason}; or download it and give its path") from None


def _request_errors() -> tuple[type[Exception], ...]:
    store_errors = (getattr(sys.modules.get(module), name, None) for module, name in STORE_ERRORS)
    return (OSError, *(error for error in store_errors if error is not None))


def _retry(request: Callable[[], T]) -> T:
    """The result of a request, tried up to TRIES times. Raises: OSError."""
    for number in range(TRIES):
        try:
            return request()
        except PERMANENT_ERRORS:
            raise
        except _request_errors() as error:
            if number == TRIES - 1:
                raise OSError(f"{' '.join(str(error).split())[:200] or type(error).__name__}, {TRIES} times") from None
            time.sleep(WAIT_S * 2**number)
    raise AssertionError


def _request(url: str, request: Callable[[], T]) -> T:
    """The result of a request. Raises: UserError if it fails."""
    try:
        return _retry(request)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{url}: cannot be read: {reason}") from None


class _ReopeningFile(io.RawIOBase):
    """A file that is opened again at the same position after a failed read."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0
        self._open: Any = None
        _retry(self._reopen)

    def _reopen(self) -> Any:
        if self._open is None:
            self._open = self._file.store.open(self._file.path, "rb")
            if self._position:
                self._open.seek(self._position)
        return self._open

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._reopen().seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._reopen().seek(offset, whence)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = _retry(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            return bytes(self._reopen().read(size))
        except _request_errors():
            self._open = None
            raise
