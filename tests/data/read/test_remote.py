"""Data files in an object store: read like files on a disk, also when the store fails in the middle of a file."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from data.build.mixture import parse_data_path
from data.read import remote
from data.read.paths import TableConfig, open_path
from rlhf.errors import UserError

ROWS = [{"prompt": f"say {i}", "response": "é" * i} for i in range(300)]
LINES = "".join(f'{{"prompt": "say {i}", "response": "{"é" * i}"}}\n' for i in range(300)).encode()


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    store = MemoryFileSystem()
    yield store
    store.rm("/", recursive=True)


def rows_of(path: str) -> list[Any]:
    return list(open_path(path).records("train", TableConfig()))


def fingerprint(path: str) -> str:
    return open_path(path).fingerprint("train", TableConfig())


def refusal(path: str) -> str:
    with pytest.raises(UserError) as refused:
        rows_of(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_of_a_store_are_read_as_files_on_the_disk(store: MemoryFileSystem, tmp_path: Path) -> None:
    table = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    files = {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), "c.parquet": table.read_bytes(), "notes.md": b"#"}
    for name, content in files.items():
        store.pipe(f"/data/{name}", content)
    for name in list(files)[:3]:
        url = f"memory://data/{name}"
        assert rows_of(url) == [(f"{url}:{i}", row) for i, row in enumerate(ROWS, 1)]
    assert [location for location, _ in rows_of("memory://data")][::300] == [
        "memory:///data/a.jsonl:1",
        "memory:///data/b.jsonl.gz:1",
        "memory:///data/c.parquet:1",
    ]
    assert len(rows_of("memory://data/*.jsonl")) == 300
    for name in (".hidden/x.jsonl", "dataset_info.json", "LICENSE.txt"):
        store.pipe(f"/data/{name}", b"no rows")
    assert len(rows_of("memory://data")) == 900, "what is left out of a local directory"
    store.pipe("/data/test.jsonl", b"{}")
    with pytest.raises(UserError, match=r"got 'test.jsonl' beside files to train on; .* as memory://data/train\*"):
        rows_of("memory://data")
    assert len(rows_of("memory://data/*.jsonl.gz")) == 300


def test_a_fingerprint_changes_with_the_file(store: MemoryFileSystem) -> None:
    store.pipe("/x.jsonl", LINES)
    before = fingerprint("memory://x.jsonl")
    assert fingerprint("memory://x.jsonl") == before
    store.pipe("/x.jsonl", LINES + LINES)
    assert fingerprint("memory://x.jsonl") != before


@pytest.mark.parametrize("failures", [1, remote.TRIES - 1, remote.TRIES])
def test_a_failed_request_is_repeated(failures: int, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on in the middle of the file."""
    store.pipe("/x.jsonl", LINES)
    read, left, waits = MemoryFile.read, [failures], []

    def failing(self: MemoryFile, size: int = -1) -> Any:
        if self.tell() and left[0]:
            left[0] -= 1
            raise ConnectionResetError(104, "Connection reset by peer")
        return read(self, min(size, 10_000))

    monkeypatch.setattr(MemoryFile, "read", failing)
    monkeypatch.setattr("time.sleep", waits.append)
    if failures < remote.TRIES:
        assert [row for _, row in rows_of("memory://x.jsonl")] == ROWS
    else:
        message = "memory://x.jsonl: cannot be read: [Errno 104] Connection reset by peer, 4 times"
        assert refusal("memory://x.jsonl") == message
    assert waits == [1.0, 2.0, 4.0][:failures]


def test_what_is_not_there_is_one_line(store: MemoryFileSystem) -> None:
    assert refusal("memory://no.jsonl") == "memory://no.jsonl: cannot be read: no such file"
    assert refusal("memory://no/*.jsonl") == "memory://no/*.jsonl: no such data file"
    assert refusal("s3://bucket/x.jsonl").startswith("s3://bucket/x.jsonl: cannot be read: Install s3fs")
    for other in ("zzz://x.jsonl", "https://a/x.jsonl::memory://b"):
        assert refusal(other).startswith(f"{other}: no such file or directory")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/d/x.jsonl?token=a/b.csv", "x.jsonl"),
        ("https://h/d/x.jsonl.gz?download=true#top", "x.jsonl.gz"),
        ("https://h/d/x.json#L1", "x.json"),
        ("s3://b/d/what?.jsonl", "what?.jsonl"),  # a name in an object store may have any character
        ("https://h/d?file=x.jsonl", "d"),
    ],
)
def test_the_query_of_a_web_address_is_no_part_of_its_name(url: str, name: str) -> None:
    file = remote.RemoteFile(url, None)
    assert (file.name, file.suffix) == (name, Path(name).suffix)
    assert str(file) == url


def test_a_url_is_a_data_path() -> None:
    assert parse_data_path("https://h/x.jsonl?token=ab1&n=c") == ("files", "https://h/x.jsonl?token=ab1&n=c", None)
    assert parse_data_path("https://h/x.jsonl?page=2") == ("files", "https://h/x.jsonl?page=2", None)
    assert parse_data_path("https://h/x.jsonl?page=2=0.5") == ("files", "https://h/x.jsonl?page=2", 0.5)
    assert parse_data_path("hh_rlhf:https://h/x.jsonl?a=b&n=3=2") == ("hh_rlhf", "https://h/x.jsonl?a=b&n=3", 2)
    assert parse_data_path("s3://b/x.jsonl=0.5") == ("files", "s3://b/x.jsonl", 0.5)
    assert parse_data_path("files,chosen=good:gs://b/x.csv") == ("files,chosen=good", "gs://b/x.csv", None)
    assert parse_data_path("hh_rlhf:https://h/x.jsonl") == ("hh_rlhf", "https://h/x.jsonl", None)
