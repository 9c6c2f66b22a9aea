"""Data files, read row by row. Errors have the form `file:line: what, got, expected`."""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, cast

from data.read.json_rows import parse_array
from data.read.records import Record, Skipped, column_names, without_padding
from data.read.remote import DataFile, RemoteFile, refuse_failures
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER, parse_record

LocatedRecords = Iterator[tuple[str, Record | Skipped]]
"""(location, record); the location is file:line, and a Skipped replaces a record that cannot be read"""

BUFFER = 1 << 17
MAX_CELL = 1 << 27
"""bytes of one cell of a CSV file; a cell whose quote is never closed ends in an error at this size"""
PARQUET_ROWS = 256
"""rows of a parquet file that are decoded at once"""
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
"""how a list of messages begins that someone has written into a cell"""
UTF8 = "expected UTF-8; convert the file, e.g. with iconv"

LFS_POINTER = b"version https://git-lfs"


def suffix(path: DataFile) -> str:
    """The suffix in lower case and without .gz: `.jsonl` for both x.jsonl and x.JSONL.gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_records(path: DataFile, lines: bool = False) -> LocatedRecords:
    """Every row of a data file. A row that cannot be read gives a Skipped, and reading continues with the next row.

    lines: whether each line of a .txt file is a document
    Raises: UserError if the whole file cannot be read: it is damaged, or its format differs from its suffix.
    """
    with _open_file(path) as file:
        yield from _read_lines(path, file) if lines and suffix(path) == ".txt" else FORMATS[suffix(path)](path, file)


@contextmanager
def _open_file(path: DataFile) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed, without a byte order mark."""
    with refuse_failures(path):
        try:
            with _decompressed(path) as file:
                head = file.peek(64)[:64]
                _refuse_no_text(path, head)
                if head.startswith(codecs.BOM_UTF8):
                    file.read(len(codecs.BOM_UTF8))
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            other = str(error).startswith("Not a gzipped file")
            cure = "take .gz off its name" if other else "fetch or compress it again"
            raise UserError(f"{path}: not a whole gzip file ({error}); {cure}") from None


def _decompressed(path: DataFile) -> io.BufferedReader:
    # reading lines from a buffer over a gzip file is faster than from the gzip file
    raw = path.open() if isinstance(path, RemoteFile) else io.FileIO(path)
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=io.BufferedReader(raw, BUFFER))), BUFFER)
    return io.BufferedReader(raw, BUFFER)


def _refuse_no_text(path: DataFile, head: bytes) -> None:
    """Raises: UserError for a pointer in place of a file, and for zero bytes, which UTF-8 allows and no text has."""
    if head.startswith(LFS_POINTER):
        raise UserError(f"{path}: got a Git LFS pointer, expected {suffix(path)}; fetch the file: git lfs pull")
    if b"\0" in head[:8] and suffix(path) != ".parquet":
        cure = "convert UTF-16 with iconv -f UTF-16 -t UTF-8, unpack an archive, or fetch the file again"
        raise UserError(f"{path}: begins with zero bytes, expected {suffix(path)} in UTF-8; {cure}")


def _read_json(path: DataFile, file: IO[bytes]) -> LocatedRecords:
    """One row per line, or one array."""
    head = cast(io.BufferedReader, file).peek(1 << 16).lstrip()
    if head.startswith(b"["):
        yield from parse_array(_decode(path, 1, file.read()), path)
        return
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        location = f"{path}:{number}"
        try:
            yield location, parse_record(line.decode(), location)
        except UnicodeDecodeError as error:
            yield location, Skipped(_not_utf8(location, error), bad=True)
        except UserError as error:
            yield location, Skipped(str(error), bad=True)


def _not_utf8(location: str, error: UnicodeDecodeError, offset: int = 0) -> str:
    byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start - offset} of the line"
    return f"{location}: got {byte}, {UTF8}"


def _read_csv(path: DataFile, file: IO[bytes], delimiter: str) -> LocatedRecords:
    csv.field_size_limit(MAX_CELL)
    # A byte that is not UTF-8 becomes half a surrogate pair, so that it spoils no other row.
    lines = (line.decode(errors="surrogateescape") for line in file)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    columns: list[str] = []
    while True:
        start = reader.line_num + 1
        location, bad = f"{path}:{start}", ""
        try:
            cells = next(reader)
            "".join(cells).encode()
        except StopIteration:
            return
        except csv.Error as error:
            end = f" at line {reader.line_num}" if reader.line_num > start else ""
            cure = 'write a cell with quotes or line breaks as "...", each quote inside it twice'
            bad = f"{location}: not valid {suffix(path)[1:].upper()}: {error}{end}; {cure}"
        except UnicodeEncodeError as error:
            bad = f"{location}: got byte 0x{ord(error.object[error.start]) - 0xDC00:02x}, {UTF8}"
        if bad and not columns:
            raise UserError(bad)
        if bad:
            yield location, Skipped(bad, bad=True)
        elif len(cells) == len(columns) and cells:
            named = zip(columns, cells, strict=True)
            try:
                yield location, {column: _cell(cell, f"{location}: {column}") for column, cell in named}
            except UserError as error:
                yield location, Skipped(str(error), bad=True)
        elif cells and not columns:
            columns = _read_header(location, cells)
        elif cells:
            count = f"cells: got {len(cells)}, expected {len(columns)} as in the header"
            yield location, Skipped(f"{location}: {count}; quote cells that contain {delimiter!r}", bad=True)


def _cell(text: str, location: str) -> object:
    """The text of a cell; or the list of messages that it holds as JSON, because a cell has no lists of its own.

    Raises: UserError for a list of messages that is no JSON, such as pandas writes.
    """
    if not MESSAGES.match(text):
        return text
    try:
        return DECODER.decode(text)
    except ValueError as error:
        cure = "write it with json.dumps, or write JSON lines"
        raise UserError(
            f"{location}: got {text[:30]!r}, a list of messages that is no JSON ({error}); {cure}"
        ) from None


def _read_header(location: str, cells: list[str]) -> list[str]:
    repeated = [cell for cell in dict.fromkeys(cells) if cells.count(cell) > 1]
    if repeated:
        raise UserError(f"{location}: got the columns {column_names(cells)}, expected {column_names(repeated)} once")
    return cells


def _read_documents(path: DataFile, file: IO[bytes]) -> LocatedRecords:
    """Documents separated by blank lines, in a column `text`."""
    lines: list[bytes] = []
    for number, line in enumerate(chain(file, [b""]), 1):
        if line.strip():
            lines.append(line)
        elif lines:
            yield _decode_document(path, number - len(lines), b"".join(lines))
            lines = []


def _read_lines(path: DataFile, file: IO[bytes]) -> LocatedRecords:
    """A document in each line that is not empty, in a column `text`."""
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _decode_document(path, number, line)


def _decode_document(path: DataFile, number: int, content: bytes) -> tuple[str, Record | Skipped]:
    location = f"{path}:{number}"
    try:
        return location, {"text": _decode(path, number, content).replace("\r\n", "\n").rstrip("\n")}
    except UserError as error:
        return location, Skipped(str(error), bad=True)


def _decode(path: DataFile, number: int, content: bytes) -> str:
    """The text of several lines, the first of which has this number. Raises: UserError if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        location = f"{path}:{number + content.count(bytes([10]), 0, error.start)}"
        raise UserError(_not_utf8(location, error, content.rfind(b"\n", 0, error.start) + 1)) from None


def _read_parquet(path: DataFile, file: IO[bytes]) -> LocatedRecords:
    import pyarrow  # heavy, needed here only
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        if len(set(columns)) < len(columns):
            raise UserError(f"{path}: got the columns {column_names(columns)}, expected each once")
        for batch in table.iter_batches(batch_size=PARQUET_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", without_padding(record)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file after row {number}: {reason}; fetch it again") from None


FORMATS: dict[str, Callable[[DataFile, IO[bytes]], LocatedRecords]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".txt": _read_documents,
}
