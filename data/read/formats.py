"""Data files read row by row, with errors of the form `file:line: what, got, expected`."""

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from data.read.json_rows import array_rows, parse_record
from data.read.records import Record, Skipped, names
from rlhf.errors import UserError

Found = Iterator[tuple[str, Record | Skipped]]
"""(where, record), where is file:line; in place of a record that cannot be read, why"""

BUFFER = 1 << 17
MAX_CELL = 1 << 27
"""bytes of one cell of a CSV file: what a quote that is never closed may swallow before it is noticed"""
PARQUET_ROWS = 1024
PARQUET_BYTES = 1 << 24
"""bytes of a parquet file that become Python objects at once, as far as PARQUET_ROWS rows are not fewer"""

FOREIGN = (
    (b"\x1f\x8b", "a gzip file", "add .gz to its name"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "decompress it, or compress it with gzip"),
    (b"\xfd7zXZ", "an xz file", "decompress it, or compress it with gzip"),
    (b"BZh91AY&SY", "a bzip2 file", "decompress it, or compress it with gzip"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", "unpack it, or save it as CSV"),
    (b"PAR1", "a parquet file", "name it .parquet"),
    (b"version https://git-lfs", "the pointer that Git LFS keeps in place of a file", "fetch the file: git lfs pull"),
    (b"<!doctype html", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)


def suffix(path: Path) -> str:
    """`.jsonl` of both x.jsonl and x.jsonl.gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def records(path: Path) -> Found:
    """Every row of a data file. A row that cannot be read is one Skipped, and the next one follows.

    Raises: UserError if the file as a whole cannot be read: it is damaged, or something else than its name says.
    """
    with _opened(path) as file:
        yield from READERS[suffix(path)](path, file)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed, without a byte order mark."""
    try:
        with _decompressed(path) as file:
            head = file.peek(64)[:64]
            _refuse_foreign(path, head)
            if head.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        cure = "take .gz off its name" if str(error).startswith("Not a gzipped file") else "fetch or compress it again"
        raise UserError(f"{path}: not a whole gzip file ({error}); {cure}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decompressed(path: Path) -> io.BufferedReader:
    # a gzip file gives its lines slower than a buffer over it
    raw = gzip.GzipFile(path) if path.suffix.lower() == ".gz" else io.FileIO(path)
    return io.BufferedReader(cast(io.RawIOBase, raw), BUFFER)


def _refuse_foreign(path: Path, head: bytes) -> None:
    """Raises: UserError if a file begins like one of another kind."""
    kind = suffix(path)
    for start, what, cure in FOREIGN:
        own = (start == b"PAR1" and kind == ".parquet") or (start.startswith(b"<") and kind == ".txt")
        if head.lower().startswith(start.lower()) and not own:
            raise UserError(f"{path}: got {what}, expected {kind}; {cure}")
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or head.count(b"\0") * 3 > len(head)
    if wide and kind != ".parquet":
        raise UserError(f"{path}: got UTF-16 or UTF-32, expected UTF-8; write it anew: iconv -f UTF-16 -t UTF-8")


def _json(path: Path, file: IO[bytes]) -> Found:
    """One row a line, or one array."""
    head = cast(io.BufferedReader, file).peek(1 << 16).lstrip()
    if not head.startswith(b"["):
        yield from _json_lines(path, file)
        return
    yield from array_rows(path, file)


def _json_lines(path: Path, file: IO[bytes]) -> Found:
    first = True
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        if first:
            _refuse_layout(path, number, line)
            first = False
        where = f"{path}:{number}"
        try:
            yield where, parse_record(line.decode(), where)
        except UnicodeDecodeError as error:
            yield where, Skipped(_undecodable(where, error), bad=True)
        except UserError as mistake:
            yield where, Skipped(str(mistake), bad=True)


def _refuse_layout(path: Path, number: int, line: bytes) -> None:
    """Raises: UserError if rows are laid out in a way that makes every line a mistake."""
    start = line.strip()
    if start[:1] == b"[":
        raise UserError(f"{path}:{number}: got an array, expected one object a line; name a file of one array .json")
    if start == b"{":
        raise UserError(
            f"{path}:{number}: got an object over several lines, expected one row a line (jq -c . FILE writes it so), "
            "or one array of rows in a .json file"
        )


def _undecodable(where: str, error: UnicodeDecodeError, offset: int = 0) -> str:
    said = f"got byte 0x{error.object[error.start]:02x} at offset {error.start - offset} of the line, expected UTF-8"
    return f"{where}: {said}; convert the file, e.g. with iconv"


def _csv(path: Path, file: IO[bytes], delimiter: str) -> Found:
    wrong: list[str] = []
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(_csv_lines(path, file, wrong), delimiter=delimiter, strict=True)
    columns: list[str] = []
    while True:
        start = reader.line_num + 1
        where = f"{path}:{start}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            end = f" at line {reader.line_num}" if reader.line_num > start else ""
            cure = 'write a cell with quotes or line breaks as "...", each quote inside it twice'
            wrong.append(f"{where}: not valid {suffix(path)[1:].upper()}: {error}{end}; {cure}")
        if wrong and not columns:
            raise UserError(wrong[0])
        if wrong:
            yield where, Skipped(wrong[0], bad=True)
            wrong.clear()
        elif len(cells) == len(columns) and cells:
            yield where, dict(zip(columns, cells, strict=True))
        elif cells and not columns:
            columns = _header(where, cells, delimiter)
        elif cells:
            said = f"cells: got {len(cells)}, expected {len(columns)} as in the header"
            yield where, Skipped(f"{where}: {said}; quote those that hold {delimiter!r}", bad=True)


def _csv_lines(path: Path, file: IO[bytes], wrong: list[str]) -> Iterator[str]:
    """The lines. One that is not UTF-8 is noted in `wrong` and passed on, for a row may go over several lines."""
    for number, line in enumerate(file, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            wrong.append(_undecodable(f"{path}:{number}", error))
            yield line.decode(errors="replace")


def _header(where: str, cells: list[str], delimiter: str) -> list[str]:
    twice = [cell for cell in dict.fromkeys(cells) if cells.count(cell) > 1]
    if twice:
        raise UserError(f"{where}: got the columns {names(cells)}, expected {names(twice)} once")
    if len(cells) == 1 and any(other in cells[0] for other in ",;\t" if other != delimiter):
        expected = "tabs (.tsv)" if delimiter == "\t" else "commas (.csv)"
        raise UserError(f"{where}: got one column '{names(cells)}', expected columns parted by {expected}")
    return cells


def _documents(path: Path, file: IO[bytes]) -> Found:
    """Documents, parted by blank lines, in a column `text`."""
    lines: list[bytes] = []
    for number, line in enumerate(chain(file, [b""]), 1):
        if line.strip():
            lines.append(line)
        elif lines:
            yield _document(path, number - len(lines), b"".join(lines))
            lines = []


def _document(path: Path, number: int, content: bytes) -> tuple[str, Record | Skipped]:
    try:
        return f"{path}:{number}", {"text": content.decode().replace("\r\n", "\n").rstrip("\n")}
    except UnicodeDecodeError as error:
        where = f"{path}:{number + content.count(bytes([10]), 0, error.start)}"
        return where, Skipped(_undecodable(where, error, content.rfind(b"\n", 0, error.start) + 1), bad=True)


def _parquet(path: Path, file: IO[bytes]) -> Found:
    import pyarrow  # heavy, needed here only
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        if len(set(columns)) < len(columns):
            raise UserError(f"{path}: got the columns {names(columns)}, expected each once")
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        largest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        for batch in table.iter_batches(batch_size=max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(largest, 1)))):
            for record in _batch_records(batch):
                number += 1
                where = f"{path}:{number}"
                yield where, Skipped(f"{where}: {record}", bad=True) if isinstance(record, str) else record
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file after row {number}: {reason}; fetch it again") from None


def _batch_records(batch: Any) -> Iterator[Record | str]:
    """The records; in place of one with a value that Python cannot hold, what is wrong with it."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for i in range(batch.num_rows):
            try:
                yield from batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield f"got byte 0x{error.object[error.start]:02x} at offset {error.start} of a text, expected UTF-8"
            except (ValueError, OverflowError) as error:
                yield " ".join(str(error).split())[:200]


READERS: dict[str, Callable[[Path, IO[bytes]], Found]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": partial(_csv, delimiter=","),
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
    ".txt": _documents,
}
SUFFIXES = tuple(READERS)
