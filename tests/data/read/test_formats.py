"""Every kind of data file gives the same rows; what is unusual and sound is read."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data.read.formats import read_records, suffix
from data.read.paths import TableConfig, open_path
from data.read.records import Skipped

ROWS = [
    {"prompt": "a\u2028b\u0085c", "response": 'say "é"'},
    {"prompt": "two\nlines, \ttab", "response": ""},
    {"prompt": "\x00\x07 ' \\n", "response": "漢字 🙂"},
]
TEXTS = ["x.jsonl", "x.ndjson", "x.json", "array.json", "array.jsonl", "pretty.json", "x.csv", "x.tsv"]


def content_of(name: str, rows: list[dict[str, Any]]) -> bytes:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if suffix(Path(name)) in (".csv", ".tsv"):
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(rows[0]), delimiter="\t" if "tsv" in name else ",")
        writer.writeheader()
        writer.writerows(rows)
        return table.getvalue().encode()
    if name.startswith("pretty"):
        return json.dumps(rows, indent=4).encode()
    return ("[" + ",\n".join(lines) + "]" if name.startswith("array") else "\n".join(lines)).encode()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        content = content_of(path.name, rows)
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", [*TEXTS, *(name + ".gz" for name in TEXTS), "X.JSONL", "x.parquet"])
def test_every_kind_reads_the_same_rows(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, ROWS)
    result = list(read_records(file))
    assert [record for _, record in result] == ROWS
    assert all(location.startswith(f"{file}:") for location, _ in result)


def test_a_cell_with_messages_is_the_list_that_it_says(tmp_path: Path) -> None:
    """As json.dumps writes it; as pandas writes a list, it would be learned as text with brackets and roles."""
    messages = [{"role": "user", "content": 'say "é"'}, {"role": "assistant", "content": "é, [{no}]"}]
    rows = [{"a": json.dumps(messages), "b": "[{1}]"}, {"a": str(messages), "b": ""}, {"a": '[{"role": NaN}]', "b": ""}]
    parsed, *refused = [record for _, record in read_records(write(tmp_path / "x.csv", rows))]
    assert parsed == {"a": messages, "b": "[{1}]"}
    for record in refused:
        assert isinstance(record, Skipped) and record.bad and "a list of messages that is no JSON" in record.reason
    assert f"{tmp_path}/x.csv:3: a: got" in refused[0].reason and "json.dumps" in refused[0].reason


def test_locations_of_rows(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('a,b\n1,"2\n3"\n\n4,5\n')
    assert [location.rpartition(":")[2] for location, _ in read_records(tmp_path / "x.csv")] == ["2", "5"]
    (tmp_path / "x.json").write_text('[{"a": 1},\n\n{"a":\n2}, {"a": 3}]')
    locations = [location.removeprefix(f"{tmp_path}/x.json") for location, _ in read_records(tmp_path / "x.json")]
    assert locations == [": row 1", ": row 2", ": row 3"]


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_a_document_a_line(tmp_path: Path, name: str) -> None:
    """`lines=true`, of a file and of a directory."""
    content = b"\xef\xbb\xbfone two\r\n\n  three\n \nb\xff\nfour"
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for location in (path, tmp_path):
        *leading, bad, last = open_path(str(location)).records("train", TableConfig(lines=True))
        assert [*leading, last] == [
            (f"{path}:{line}", {"text": text}) for line, text in ((1, "one two"), (3, "  three"), (6, "four"))
        ]
        assert bad[0] == f"{path}:5" and isinstance(bad[1], Skipped) and "0xff at offset 1" in bad[1].reason


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_byte_order_mark_carriage_returns_and_blank_lines(tmp_path: Path, bom: bytes, end: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(bom + end.join([b'{"a": 1}', b"", b'  {"a": 2} \t', b"", b""]))
    assert list(read_records(file)) == [(f"{file}:1", {"a": 1}), (f"{file}:3", {"a": 2})]
    table = tmp_path / "x.csv"
    table.write_bytes(bom + end.join([b"a,b", b"1,2", b""]))
    assert list(read_records(table)) == [(f"{table}:2", {"a": "1", "b": "2"})]
    array = tmp_path / "x.json"
    array.write_bytes(bom + end + b"[" + end + b'{"a": 1}' + end + b"]" + end)
    assert [record for _, record in read_records(array)] == [{"a": 1}]
    documents = tmp_path / "x.txt"
    documents.write_bytes(bom + end.join([b"", b" one", b"two ", b" \t", b"", b"three", b""]))
    assert list(read_records(documents)) == [
        (f"{documents}:2", {"text": " one\ntwo "}),
        (f"{documents}:6", {"text": "three"}),
    ]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\r\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read_records(tmp_path / name)) == []


@pytest.mark.parametrize("content", ["[]", " [ \n ] \n"])
def test_an_empty_array_has_no_rows(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    assert list(read_records(tmp_path / "x.json")) == []


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet", "x.txt", "x.jsonl.gz"])
def test_a_line_of_ten_megabytes(tmp_path: Path, name: str) -> None:
    long = "tenchars! " * 1_000_000
    if name == "x.txt":
        (tmp_path / name).write_text(long)
    else:
        write(tmp_path / name, [{"text": long}])
    assert [record for _, record in read_records(tmp_path / name)] == [{"text": long}]
