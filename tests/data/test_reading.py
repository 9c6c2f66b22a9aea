"""Data files of every kind, whole and broken. Every message begins with the file and, where there is one, the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data.reading import data_files, is_hub_id, records, text
from rlhf.config import UserError

ROWS = [{"prompt": "a\u2028b", "response": 'say "é"'}, {"prompt": "two\nlines", "response": ""}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if ".csv" in path.name:
        cells = [",".join('"' + str(cell).replace('"', '""') + '"' for cell in row.values()) for row in rows]
        lines = [",".join(rows[0]), *cells]
    content = ("[" + ",\n".join(lines) + "]" if path.name.startswith("array") else "\n".join(lines)).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.jsonl.gz", "x.json", "array.json", "array.json.gz", "x.csv", "x.csv.gz", "x.parquet"]
)
def test_every_kind_reads_the_same_rows(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, ROWS)
    found = list(records(file))
    assert [record for _, record in found] == ROWS
    assert all(where.startswith(str(file)) for where, _ in found)


def test_byte_order_mark_carriage_returns_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n\n')
    assert list(records(file)) == [(f"{file}:1", {"a": 1}), (f"{file}:3", {"a": 2})]
    table = tmp_path / "x.csv"
    table.write_bytes(b"\xef\xbb\xbfa,b\r\n1,2\r\n")
    assert list(records(table)) == [(f"{table}:2", {"a": "1", "b": "2"})]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    for content in ("", "\n\n"):
        (tmp_path / name).write_text(content)
        assert list(records(tmp_path / name)) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": 2\n', r":2: not valid JSON: Expecting ',' delimiter"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r":2: got byte 0xff at offset 7, expected UTF-8"),
        ("x.jsonl", b'{"a": 1}\n[1]\n', r":2: got a list, expected an object"),
        ("x.jsonl", b'{"a": 1, "a": 2}\n', r":1: not valid JSON: the key 'a' is there twice"),
        ("x.jsonl", b'{"a": NaN}\n', r":1: not valid JSON: got NaN, expected a finite number"),
        ("x.jsonl", b"[" * 100_000, r":1: not valid JSON"),
        ("x.json", b'[{"a": 1},\n{"a" 2}]', r":2: not valid JSON: Expecting ':'"),
        ("x.json", b'[{"a": 1}, 3]', r": row 2: got a int, expected an object"),
        ("x.csv", b"a,b\n1,2\n3\n", r":3: got a row of another length, expected 2 columns"),
        ("x.csv", b"a,b\n1,2,3\n", r":2: got a row of another length, expected 2 columns"),
        ("x.csv", b"a,a\n1,2\n", r":1: got the columns a, a, expected each once"),
        ("x.csv", b'a,b\n1,"2\n', r":2: not valid CSV"),
        ("x.jsonl.gz", b"not gzip", r"after line 0: cannot be read"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9999, mtime=0)[:-200], r"cannot be read"),
        ("x.parquet", b"PAR1 no", r"not a readable parquet file"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        list(records(file))
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, 3, ["x"], "\ud800"])
def test_text_is_text(value: Any) -> None:
    with pytest.raises(UserError, match=r"f:1: a: got .*, expected text"):
        text({"a": value}, "a", "f:1")


def test_a_missing_column_names_those_there_are() -> None:
    with pytest.raises(UserError, match="f:1: no column 'c'; have a, b"):
        text({"a": "", "b": ""}, "c", "f:1")


def test_a_directory_gives_its_data_files_in_order(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "a.csv.gz", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert data_files(str(tmp_path)) == [tmp_path / "a.csv.gz", tmp_path / "b/x.jsonl"]
    with pytest.raises(UserError, match=r"README.md: got a '.md' file, expected .json, .jsonl"):
        data_files(str(tmp_path / "README.md"))


def test_what_can_only_be_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    assert is_hub_id("owner/name")
    for place in ("a/b", "./x", "../x", "/x", "x/y/z", "x/y.jsonl", "x", "~/x"):
        assert not is_hub_id(place)
