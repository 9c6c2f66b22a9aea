"""Rows written as JSON: one a line, or one array, read in pieces so that it may be larger than the memory.

Python's reader lets a key that comes twice and NaN pass. The hook that sees them adds 0.4 us to a row of 600 bytes;
what makes `json.loads` slow with a hook (1.5 us) is that it builds a decoder for every call.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from types import NoneType
from typing import IO, Any

from data.read.records import Record, Skipped
from rlhf.errors import UserError

SPACE = " \t\r\n"
MARK = re.compile(rf"[^{SPACE}]")
PIECE = 1 << 20
"""bytes of an array read at once"""
LONGEST_WORD = 16
"""characters: a word such as -Infinity, an escape, or the 1e-05 that began as 1 may be cut by the end of a piece"""
KINDS = {list: "an array", str: "text", int: "a number", float: "a number", bool: "true or false", NoneType: "null"}


def parse_record(line: str, where: str) -> Record:
    """The object on one line, which is not blank.

    Raises: UserError for what is no JSON, a key that comes twice, NaN, or another value than an object.
    """
    try:
        value = _parse(line.rstrip(SPACE))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {_reason(error)}; mend or remove the line") from None
    if type(value) is not dict:
        raise UserError(_no_object(value, where))
    return value


def _parse(line: str) -> Any:
    if line[0] in SPACE:
        return DECODER.decode(line)
    value, end = DECODER.raw_decode(line)
    return value if end == len(line) else DECODER.decode(line)  # which says what follows


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(twice)[:60]} is there twice")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(f"got {constant}, expected a finite number or null")


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if str(error).startswith("Exceeds the limit") else str(error)


def _no_object(value: Any, where: str) -> str:
    return f"{where}: got {KINDS[type(value)]}, expected an object with named columns"


DECODER = JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
LENIENT = JSONDecoder(parse_int=str, parse_float=str)
"""finds the end of a value that DECODER refuses"""


def array_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Record | Skipped]]:
    """(where, record) of each element of the array in a file; in place of one that is no row, why.

    Raises: UserError where the array itself is broken, for what follows cannot be told apart.
    """
    text = _Text(file, path)
    text.take("[")
    number = 0
    mark = "," if text.next() != "]" else "]"
    while mark == ",":
        number += 1
        text.next()
        where = f"{path}:{text.line}: row {number}"
        value = text.value()
        if isinstance(value, UserError):
            yield where, Skipped(f"{where}: not valid JSON: {value}; mend or remove the row", bad=True)
        else:
            yield where, value if type(value) is dict else Skipped(_no_object(value, where), bad=True)
        mark = text.take(",]")
    if number == 0:
        text.take("]")
    if text.next():
        raise text.mistake("something follows the array")


@dataclass
class _Text:
    """The characters of a file, some of them at a time, and how far they have been read."""

    file: IO[bytes]
    path: Path
    buffer: str = ""
    position: int = 0
    line: int = 1
    """of the position"""
    gone: int = 0
    """characters before the buffer on the line it begins in"""
    ended: bool = False
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def next(self) -> str:
        """The next character that is no white space, which becomes the position; empty at the end."""
        while True:
            found = MARK.search(self.buffer, self.position)
            self._advance(found.start() if found else len(self.buffer))
            if found or self.ended:
                return found[0] if found else ""
            self._fill()

    def take(self, marks: str) -> str:
        """The next character, which must be one of `marks`."""
        found = self.next()
        if not found or found not in marks:
            got = json.dumps(found) if found else "the end of the file (is it cut off?)"
            raise self.mistake(f"got {got}, expected {' or '.join(repr(mark) for mark in marks)}")
        self._advance(self.position + 1)
        return found

    def value(self) -> Any:
        """The value at the position; a UserError in place of one that is refused but whose end is plain."""
        while True:
            found, end = self._scan()
            if end < len(self.buffer) - LONGEST_WORD or self.ended:
                self._advance(end)
                return found
            self._fill()

    def mistake(self, what: str, position: int | None = None) -> UserError:
        position = self.position if position is None else position
        line = self.line + self.buffer.count("\n", self.position, position)
        start = self.buffer.rfind("\n", 0, position) + 1
        column = position - start + 1 + (0 if start else self.gone)
        what = what.removesuffix(" at")
        return UserError(
            f"{self.path}:{line}: not valid JSON: {what} at column {column}; expected one array of objects"
        )

    def _scan(self) -> tuple[Any, int]:
        """(value, its end); the end of the buffer if there must be more of it."""
        try:
            return DECODER.raw_decode(self.buffer, self.position)
        except JSONDecodeError as error:
            return None, self._cut(error)
        except (ValueError, RecursionError) as error:
            refused = UserError(_reason(error))
        try:
            return refused, LENIENT.raw_decode(self.buffer, self.position)[1]
        except JSONDecodeError as error:
            return None, self._cut(error)
        except RecursionError:
            raise self.mistake("nested too deeply") from None

    def _cut(self, error: JSONDecodeError) -> int:
        """Go on reading if the value may only be cut by the end of the buffer."""
        cut = error.msg.startswith("Unterminated string") or error.pos > len(self.buffer) - LONGEST_WORD
        if self.ended or not cut:
            raise self.mistake(error.msg, error.pos)
        return len(self.buffer)

    def _advance(self, position: int) -> None:
        if position > self.position:
            self.line += self.buffer.count("\n", self.position, position)
            self.position = position

    def _fill(self) -> None:
        """Drop what is read, and read as much again as is left: a long value is scanned a few times only."""
        start = self.buffer.rfind("\n", 0, self.position) + 1
        self.gone = self.position - start + (0 if start else self.gone)
        self.buffer = self.buffer[self.position :]
        self.position = 0
        piece = self.file.read(max(PIECE, len(self.buffer)))
        self.ended = not piece
        try:
            self.buffer += self.decoder.decode(piece, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.buffer.count("\n") + error.object.count(b"\n", 0, error.start)
            offset = self.file.tell() - len(error.object) + error.start
            raise UserError(
                f"{self.path}:{line}: got byte 0x{error.object[error.start]:02x} at offset {offset} of the file, "
                "expected UTF-8; convert the file, e.g. with iconv"
            ) from None
