"""Data files in an object store: read like files on a disk, also when the store fails in the middle of a file."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from data.prepare.mixture import parse_data_path
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
    assert [location for location, _ in rows_of("memory://data/*")][::300] == [
        "memory:///data/a.jsonl:1",
        "memory:///data/b.jsonl.gz:1",
        "memory:///data/c.parquet:1",
    ]
    assert len(rows_of("memory://data/*.jsonl")) == 300
    assert refusal("memory://data").endswith(
        "for the files of a directory write a pattern, such as memory://data/*.jsonl"
    )


def test_a_fingerprint_changes_with_the_file(store: MemoryFileSystem) -> None:
    store.pipe("/x.jsonl", LINES)
    before = fingerprint("memory://x.jsonl")
    assert fingerprint("memory://x.jsonl") == before
    store.pipe("/x.jsonl", LINES + LINES)
    assert fingerprint("memory://x.jsonl") != before


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), OSError("reset")])
def test_a_failed_request_is_one_line(error: OSError, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe("/x.jsonl", LINES)
    read = MemoryFile.readinto

    def failing(self: MemoryFile, buffer: Any) -> int:
        if self.tell():
            raise error
        return read(self, buffer)

    monkeypatch.setattr(MemoryFile, "readinto", failing)
    monkeypatch.setattr("data.read.formats.BUFFER", 10_000)
    assert refusal("memory://x.jsonl") == f"memory://x.jsonl: cannot be read: {error.strerror or 'OSError: reset'}"


def test_what_is_not_there_is_one_line(store: MemoryFileSystem) -> None:
    assert refusal("memory://no.jsonl") == "memory://no.jsonl: cannot be read: FileNotFoundError: /no.jsonl"
    assert refusal("memory://no/*.jsonl").startswith("memory://no/*.jsonl: no such data file, expected .json")
    assert refusal("s3://bucket/x.jsonl").startswith("s3://bucket/x.jsonl: cannot be read: ImportError: Install s3fs")
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
