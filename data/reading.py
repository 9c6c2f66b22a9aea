"""Reading data files row by row, with errors of the form `file:line: what, got, expected`."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rlhf.config import UserError
from rlhf.text import require_hub
from rlhf.types import Row

Phase = Literal["sft", "reward", "ppo"]

Record = dict[str, Any]

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")


class Source(Protocol):
    """What `build` of a module in data/sources returns."""

    def rows(self, phase: Phase) -> Iterator[Row]:
        """The rows for one phase, the same ones in the same order every time.

        A row of prompts only will do for ppo, a demonstration for sft and ppo, a preference for all three.
        """
        ...


def suffix(path: Path) -> str:
    """`.jsonl` of both x.jsonl and x.jsonl.gz."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def data_files(place: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The file at `place`, or the data files under a directory, sorted.

    Raises: UserError if there is none.
    """
    path = Path(place).expanduser()
    if path.is_file():
        if suffix(path) not in suffixes:
            raise UserError(f"{place}: got a '{suffix(path)}' file, expected {', '.join(suffixes)} (.gz too)")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and suffix(file) in suffixes)
    if not files:
        what = "a directory without data files" if path.is_dir() else "no such file or directory"
        raise UserError(f"{place}: {what}; expected {', '.join(suffixes)} (.gz too)")
    return files


def is_hub_id(place: str) -> bool:
    """Whether `place` can only be meant as OWNER/NAME on the hub."""
    owner, slash, name = place.partition("/")
    return bool(slash and name and "/" not in name and owner not in ("", ".", "..", "~")) and not Path(place).exists()


def records(path: Path) -> Iterator[tuple[str, Record]]:
    """(where, record) of every row of a data file; `where` is file:line.

    Raises: UserError at the first row that cannot be read.
    """
    kind = suffix(path)
    if kind == ".parquet":
        yield from _parquet(path)
        return
    with _open(path) as lines:
        if kind == ".csv":
            yield from _csv(path, lines)
        elif kind == ".json" and _is_array(lines):
            yield from _json_array(path, lines)
        else:
            yield from _json_lines(path, lines)


def text_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of a text file, plain or gzipped."""
    with _open(path, encoding) as lines:
        for number, line in _numbered(path, lines):
            yield number, line.rstrip("\r\n")


def text(record: Record, column: str, where: str) -> str:
    """The text in one column.

    Raises: UserError if the column is missing or holds something else.
    """
    if column not in record:
        raise UserError(f"{where}: no column '{column}'; have {', '.join(record) or 'none'}")
    value = record[column]
    return checked(value, f"{where}: {column}")


def checked(value: object, where: str) -> str:
    """`value`, if it is text that UTF-8 can write.

    Raises: UserError for another type, or half of a surrogate pair, which no tokenizer takes.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: got {json.dumps(value, default=str)[:60]}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: got half a surrogate pair at character {error.start}, expected text") from None
    return value


def hub_records(hub_id: str, split: str, **options: str | None) -> Iterator[tuple[str, Record]]:
    """(where, record) of every row of a split of a hub dataset; `where` is id/split:row.

    `options`: `name` (the subset) and `data_dir` of datasets.load_dataset.

    Raises: UserError at once when the hub does not answer, or has no such dataset or split.
    """
    require_hub(hub_id)
    import datasets  # half a second, needed here only

    try:
        rows = datasets.load_dataset(hub_id, split=split, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{hub_id}: the hub dataset (split {split}) cannot be loaded: {reason}; a dataset that is a loading script "
            "is refused: download its files and give their local path"
        ) from None
    for number, record in enumerate(rows, 1):
        yield f"{hub_id}/{split}:{number}", dict(record)


def _open(path: Path, encoding: str = "utf-8") -> TextIO:
    """Opened as text; a byte order mark is skipped."""
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        return opener(path, "rt", encoding=encoding, newline="" if suffix(path) == ".csv" else "\n")  # type: ignore[return-value,operator]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _numbered(path: Path, lines: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            yield number, line
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{path}: after line {number}: got byte 0x{bad:02x}, expected {error.encoding} text") from None
    except (EOFError, OSError) as error:
        raise UserError(f"{path}: after line {number}: not a whole gzip file ({error})") from None


def _is_array(lines: TextIO) -> bool:
    try:
        head = lines.read(4096).lstrip()
    except (UnicodeDecodeError, EOFError, OSError):
        head = ""  # the reader proper says where
    lines.seek(0)
    return head.startswith("[")


def _json_lines(path: Path, lines: TextIO) -> Iterator[tuple[str, Record]]:
    for number, line in _numbered(path, lines):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _record(where, _parse(where, line))


def _json_array(path: Path, lines: TextIO) -> Iterator[tuple[str, Record]]:
    whole = "".join(line for _, line in _numbered(path, lines))
    for number, value in enumerate(_parse(str(path), whole), 1):
        where = f"{path}: row {number}"
        yield where, _record(where, value)


def _parse(where: str, source: str) -> Any:
    try:
        return json.loads(source, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if "\n" in source.rstrip("\n") else ""
        raise UserError(f"{where}{line}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' is there twice")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"got {constant}, expected a finite number")


def _record(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{where}: got a {type(value).__name__}, expected an object with named columns")
    return value


def _csv(path: Path, lines: TextIO) -> Iterator[tuple[str, Record]]:
    reader = csv.DictReader((line for _, line in _numbered(path, lines)), strict=True)
    try:
        for record in reader:
            where = f"{path}:{reader.line_num}"
            if None in record or None in record.values():
                raise UserError(f"{where}: got a row of another length, expected {len(reader.fieldnames or [])} columns")
            yield where, record
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    import pyarrow  # heavy, needed here only
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from None
