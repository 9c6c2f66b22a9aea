"""What is said of a row or a file that cannot be read, word for word: where, what, expected, cure.

A bad row costs only itself; a file that is broken as a whole is refused.
"""

import gzip
from pathlib import Path

import pytest

from data.read.formats import read_records
from data.read.records import Skipped
from rlhf.errors import UserError
from rlhf.plugins import build

LINE = "fix or remove the line"
OBJECT = "expected an object with named columns"
UTF8 = "expected UTF-8; convert the file, e.g. with iconv"
CELL = 'write a cell with quotes or line breaks as "...", each quote inside it twice'

LINES = (
    (b'{"a": 2', f":2: not valid JSON: Expecting ',' delimiter at column 8; {LINE}"),
    (b'{"a" 2}', f":2: not valid JSON: Expecting ':' delimiter at column 6; {LINE}"),
    (b"  {'a': 2}", f":2: not valid JSON: Expecting property name enclosed in double quotes at column 4; {LINE}"),
    (b'{"a": "b', f":2: not valid JSON: Unterminated string starting at column 7; {LINE}"),
    (b'{"a": 1} {"a": 2}', f":2: not valid JSON: Extra data at column 10; {LINE}"),
    (b'{"a": "x\ty"}', f":2: not valid JSON: Invalid control character at column 9; {LINE}"),
    (b'{"a": "\\x"}', f":2: not valid JSON: Invalid \\escape at column 8; {LINE}"),
    (b"\0\0\0", f":2: not valid JSON: Expecting value at column 1; {LINE}"),
    (b'{"a": 1, "a": 1}', f':2: not valid JSON: the key "a" is repeated; {LINE}'),
    (b'{"b": [{"a": 1, "\\n": 2, "\\n": 3}]}', f':2: not valid JSON: the key "\\n" is repeated; {LINE}'),
    (b'{"a": NaN}', f":2: not valid JSON: got NaN, expected a finite number or null; {LINE}"),
    (b'{"a": [-Infinity]}', f":2: not valid JSON: got -Infinity, expected a finite number or null; {LINE}"),
    (b'{"a": ' + b"1" * 5000 + b"}", f":2: not valid JSON: a number has too many digits; {LINE}"),
    (b'{"a": ' + b"[" * 100_000, f":2: not valid JSON: nested too deeply; {LINE}"),
    (b"[1]", f":2: got an array, {OBJECT}"),
    (b"3", f":2: got a number, {OBJECT}"),
    (b'"x"', f":2: got text, {OBJECT}"),
    (b"null", f":2: got null, {OBJECT}"),
    (b"true", f":2: got true or false, {OBJECT}"),
    (b'{"a": "\xff\xfe"}', f":2: got byte 0xff at offset 7 of the line, {UTF8}"),
    (b'{"a": "\xe4\xb8"}', f":2: got byte 0xe4 at offset 7 of the line, {UTF8}"),
    (b'{"a": "\xc3\xa9\xed\xa0\x80"}', f":2: got byte 0xed at offset 9 of the line, {UTF8}"),
)
CELLS = (
    (b"3", ":2: cells: got 1, expected 2 as in the header; quote cells that contain ','"),
    (b"3,4,5", ":2: cells: got 3, expected 2 as in the header; quote cells that contain ','"),
    (b'3,"4"5', f":2: not valid CSV: ',' expected after '\"'; {CELL}"),
    (b"3,\xff", f":2: got byte 0xff, {UTF8}"),
    (b'"3\n\xe9",4', f":2: got byte 0xe9, {UTF8}"),
)


def read(file: Path) -> list[object]:
    return [result.reason if isinstance(result, Skipped) and result.bad else result for _, result in read_records(file)]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[message[:40] for _, message in LINES])
@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson.gz", "x.json"])
def test_a_bad_line_is_one_row(tmp_path: Path, name: str, line: bytes, message: str) -> None:
    file = tmp_path / name
    content = b'{"a": 1}\n' + line + b'\n{"a": 3}\n'
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(file) == [{"a": 1}, f"{file}{message}", {"a": 3}]


@pytest.mark.parametrize(("line", "message"), CELLS)
def test_a_bad_csv_row_is_one_row(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(b"a,b\n" + line + b'\n6,"7\n8"\n')
    assert read(file) == [f"{file}{message}", {"a": "6", "b": "7\n8"}]


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    file = tmp_path / "x.tsv"
    file.write_bytes(b'a\tb\n1\t2\n3\t"4\n5\t6\n')
    message = f"{file}:3: not valid TSV: unexpected end of data at line 4; {CELL}"
    assert read(file) == [{"a": "1", "b": "2"}, message]


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('[{"a": 1}, 3,\n"]", {"a": 2}]')
    assert read(file) == [
        {"a": 1},
        f"{file}: row 2: got a number, {OBJECT}",
        f"{file}: row 3: got text, {OBJECT}",
        {"a": 2},
    ]


def test_a_bad_document(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(b"one\n\ntwo\nth\xffree\n\nfour")
    assert read(file) == [{"text": "one"}, f"{file}:4: got byte 0xff at offset 2 of the line, {UTF8}", {"text": "four"}]


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "x.parquet"
    cells = pyarrow.array([b"one", b"t\xffwo", b"three"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"a": cells}), file)
    with pytest.raises(UserError, match=f"{file}: not a readable parquet file after row 0: .*0xff"):
        read(file)


ARRAY = "expected one array of objects"
BROKEN = (
    ("x.json", b'[{"a": 1},\n{"a" 2}]', f":2: not valid JSON: Expecting ':' delimiter at column 6; {ARRAY}"),
    ("x.json", b'[{"a": 1},\n', f":2: not valid JSON: Expecting value at column 1; {ARRAY}"),
    ("x.json", b'[{"a": "b', f":1: not valid JSON: Unterminated string starting at column 8; {ARRAY}"),
    ("x.json", b'[{"a": 1}\n', f":2: not valid JSON: Expecting ',' delimiter at column 1; {ARRAY}"),
    ("x.json", b'[{"a": 1}] 2', f":1: not valid JSON: Extra data at column 12; {ARRAY}"),
    ("x.json", b'[{"a": 1},]', f":1: not valid JSON: Expecting value at column 11; {ARRAY}"),
    ("x.json", b"[" * 100_000, f": not valid JSON: nested too deeply; {ARRAY}"),
    (
        "x.json",
        b'[{"a": 1},\n{"a": NaN}]',
        f": not valid JSON: got NaN, expected a finite number or null; {ARRAY}",
    ),
    ("x.json", b'\xef\xbb\xbf[\n{"a": "\xff"}]', f":2: got byte 0xff at offset 7 of the line, {UTF8}"),
    ("x.csv", b"a,b,a\n1,2,3\n", ":1: got the columns a, b, a, expected a once"),
    ("x.csv", b"\xff,b\n1,2\n", f":1: got byte 0xff, {UTF8}"),
    ("x.csv", b'"a\n', f":1: not valid CSV: unexpected end of data; {CELL}"),
    (
        "x.jsonl.gz",
        b'{"a": 1}',
        ": not a whole gzip file (Not a gzipped file (b'{\"')); take .gz off its name",
    ),
    (
        "x.jsonl.gz",
        gzip.compress(b'{"a": 1}\n' * 9999, mtime=0)[:-20],
        ": not a whole gzip file (Compressed file ended before the end-of-stream marker was reached); "
        "fetch or compress it again",
    ),
    (
        "x.parquet",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        ": got a Git LFS pointer, expected .parquet; fetch the file: git lfs pull",
    ),
    *(
        (
            name,
            content,
            f": begins with zero bytes, expected {name[1:]} in UTF-8; convert UTF-16 with iconv -f UTF-16 -t UTF-8, "
            "unpack an archive, or fetch the file again",
        )
        for name, content in (
            ("x.txt", bytes(5000)),
            ("x.txt", "a word".encode("utf-16-le")),
            ("x.csv", b"PK\x03\x04\x14\0\0"),
            ("x.jsonl", gzip.compress(b'{"a": 1}', mtime=0)),
        )
    ),
)


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_records(file))
    assert str(error.value) == f"{file}{message}"


@pytest.mark.parametrize("content", [b"", b"PAR1 no", b"no parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_broken_parquet_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_records(file))
    assert str(error.value).startswith(f"{file}: not a readable parquet file after row 0: ")
    assert "\n" not in str(error.value)


def test_rows_before_the_damage_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(b'{"a": %d}\n' % (i * 7919) for i in range(99_999)), mtime=0)[:-9])
    result = []
    with pytest.raises(UserError, match="not a whole gzip file"):
        for _, record in read_records(file):
            result.append(record)
    assert result[:2] == [{"a": 0}, {"a": 7919}]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        list(read_records(tmp_path / "x.jsonl"))
    assert str(error.value) == f"{tmp_path}/x.jsonl: cannot be read: No such file or directory"


ROWS = (
    ('{"prompt": null, "response": "x"}', "prompt: got null, expected text"),
    (
        '{"question": "x"}',
        "got the columns question; expected those of a shape of docs/data.md; map the columns: "
        "files,prompt=COLUMN,chosen=COLUMN,rejected=COLUMN:PATH (pairs) or files,prompt=COLUMN,response=COLUMN:PATH",
    ),
)


@pytest.mark.parametrize(("line", "message"), ROWS)
def test_a_bad_record_is_one_row(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n{line}\n{{"prompt": "three"}}\n')
    one, two, three = build("data.sources", "files", str(file)).rows("sft")
    assert two == Skipped(f"{file}:2: {message}", bad=True)
    assert (one.prompt[0].content, three.prompt[0].content) == ("one", "three")
