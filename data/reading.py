"""Reading data files row by row, with errors of the form `file:line: what, got, expected`."""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from rlhf.config import UserError
from rlhf.text import require_hub
from rlhf.types import Row

Phase = Literal["sft", "reward", "ppo"]

Record = dict[str, Any]

Lines = Iterator[tuple[int, str]]

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


def data_files(place: str) -> list[Path]:
    """The file at `place`, or the data files under a directory, sorted.

    Raises: UserError if there is none.
    """
    path = Path(place).expanduser()
    if path.is_file():
        if suffix(path) not in SUFFIXES:
            raise UserError(f"{place}: got a '{suffix(path)}' file, expected {', '.join(SUFFIXES)} (.gz too)")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and suffix(file) in SUFFIXES)
    if not files:
        what = "a directory without data files" if path.is_dir() else "no such file or directory"
        raise UserError(f"{place}: {what}; expected {', '.join(SUFFIXES)} (.gz too)")
    return files


def is_hub_id(place: str) -> bool:
    """Whether `place` can only be meant as OWNER/NAME on the hub."""
    owner, slash, name = place.partition("/")
    plain = slash and name and "/" not in name and owner not in ("", ".", "..", "~")
    return bool(plain) and suffix(Path(place)) not in SUFFIXES and not Path(place).exists()


def records(path: Path) -> Iterator[tuple[str, Record]]:
    """(where, record) of every row of a data file; `where` is file:line.

    A `.json` file is one array of rows, or one row a line.
    Raises: UserError at the first row that cannot be read.
    """
    kind = suffix(path)
    if kind == ".parquet":
        return _parquet(path)
    filled = ((number, line) for number, line in _lines(path) if kind == ".csv" or line.strip())
    first = next(filled, None)
    lines = chain([first] if first else [], filled)
    if kind == ".csv":
        return _csv(path, lines)
    if kind == ".json" and first and first[1].lstrip().startswith("["):
        return _json_array(path, lines)
    return _json_lines(path, lines)


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
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{hub_id}: the hub dataset (split {split}) cannot be loaded: {reason}; a dataset that is a loading script "
            "is refused: download its files and give their local path"
        ) from None
    for number, record in enumerate(rows, 1):
        yield f"{hub_id}/{split}:{number}", dict(record)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of a UTF-8 file, plain or gzipped; a byte order mark is skipped."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{path}:{number}: got byte 0x{bad:02x} at offset {error.start}, expected UTF-8") from None
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path}: after line {number}: cannot be read: {error}") from None


def _json_lines(path: Path, lines: Lines) -> Iterator[tuple[str, Record]]:
    for number, line in lines:
        where = f"{path}:{number}"
        yield where, _record(where, _parse(where, line))


def _json_array(path: Path, lines: Lines) -> Iterator[tuple[str, Record]]:
    for number, value in enumerate(_parse(str(path), "".join(line for _, line in lines)), 1):
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


def _csv(path: Path, lines: Lines) -> Iterator[tuple[str, Record]]:
    reader = csv.DictReader((line for _, line in lines), strict=True)
    try:
        columns = list(reader.fieldnames or [])
        if len(set(columns)) < len(columns):
            raise UserError(f"{path}:1: got the columns {', '.join(columns)}, expected each once")
        for record in reader:
            where = f"{path}:{reader.line_num}"
            if None in record or None in record.values():
                raise UserError(f"{where}: got a row of another length, expected {len(columns)} columns")
            yield where, record
    except csv.Error as error:
        raise UserError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from None


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
