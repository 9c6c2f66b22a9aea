"""Rows written as JSON: one per line, or one array, which is read in chunks because it may be larger than the memory.

Python's decoder accepts NaN and repeated keys. The hook that refuses them adds 0.4 us to a row of 600 bytes. Passing
the hook to `json.loads` would cost 1.5 us, because it builds a decoder for every call.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from types import NoneType
from typing import IO, Any

from data.read.records import Record, Skipped
from data.read.remote import DataFile
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER

SPACE = " \t\r\n"
NOT_SPACE = re.compile(rf"[^{SPACE}]")
CHUNK_BYTES = 1 << 20
"""bytes of an array that are read at once"""
MAX_TOKEN = 16
"""characters of the longest token that the end of a chunk may split unnoticed: -Infinity, an escape, 1e-05 after 1"""
TYPE_NAMES = {
    list: "an array",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def parse_record(line: str, location: str) -> Record:
    """The object on one line, which is not blank.

    Raises: UserError if it is not valid JSON, has a repeated key or NaN, or is not an object.
    """
    try:
        value = _parse_line(line.rstrip(SPACE))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not valid JSON: {_reason(error)}; fix or remove the line") from None
    if type(value) is not dict:
        raise UserError(_not_an_object(value, location))
    return value


def _parse_line(line: str) -> Any:
    if line[0] in SPACE:
        return DECODER.decode(line)
    value, end = DECODER.raw_decode(line)
    return value if end == len(line) else DECODER.decode(line)  # raises the error for what follows the value


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if str(error).startswith("Exceeds the limit") else str(error)


def _not_an_object(value: Any, location: str) -> str:
    return f"{location}: got {TYPE_NAMES[type(value)]}, expected an object with named columns"


LENIENT_DECODER = JSONDecoder(parse_int=str, parse_float=str)
"""finds the end of a value that DECODER refuses"""


def read_array(path: DataFile, file: IO[bytes]) -> Iterator[tuple[str, Record | Skipped]]:
    """(location, record) of each element of the array in a file; a Skipped replaces an element that is not a row.

    Raises: UserError if the array itself is broken, because the following elements cannot be separated.
    """
    text = _JsonText(file, path)
    text.expect("[")
    number = 0
    separator = "," if text.peek() != "]" else "]"
    while separator == ",":
        number += 1
        text.peek()
        location = f"{path}:{text.line}: row {number}"
        value = text.read_value()
        if isinstance(value, UserError):
            yield location, Skipped(f"{location}: not valid JSON: {value}; fix or remove the row", bad=True)
        else:
            yield location, value if type(value) is dict else Skipped(_not_an_object(value, location), bad=True)
        separator = text.expect(",]")
    if number == 0:
        text.expect("]")
    if text.peek():
        raise text.error("something follows the array")


@dataclass
class _JsonText:
    """The text of a file, of which a part is in memory, and the position of the parser in it."""

    file: IO[bytes]
    path: DataFile
    buffer: str = ""
    position: int = 0
    line: int = 1
    """line number of the position"""
    columns_before: int = 0
    """characters of the buffer's first line that are no longer in the buffer"""
    ended: bool = False
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def peek(self) -> str:
        """Move to the next character that is not white space and return it; an empty text at the end of the file."""
        while True:
            match = NOT_SPACE.search(self.buffer, self.position)
            self._advance(match.start() if match else len(self.buffer))
            if match or self.ended:
                return match[0] if match else ""
            self._fill()

    def expect(self, characters: str) -> str:
        """Read the next character, which must be one of `characters`."""
        character = self.peek()
        if not character or character not in characters:
            got = json.dumps(character) if character else "the end of the file (is it cut off?)"
            raise self.error(f"got {got}, expected {' or '.join(map(repr, characters))}")
        self._advance(self.position + 1)
        return character

    def read_value(self) -> Any:
        """Read the value at the position; a UserError if the value is refused but its end is known."""
        while True:
            value, end = self._scan()
            if end < len(self.buffer) - MAX_TOKEN or self.ended:
                self._advance(end)
                return value
            self._fill()

    def error(self, message: str, position: int | None = None) -> UserError:
        position = self.position if position is None else position
        line = self.line + self.buffer.count("\n", self.position, position)
        start = self.buffer.rfind("\n", 0, position) + 1
        column = position - start + 1 + (0 if start else self.columns_before)
        message = message.removesuffix(" at")
        return UserError(
            f"{self.path}:{line}: not valid JSON: {message} at column {column}; expected one array of objects"
        )

    def _scan(self) -> tuple[Any, int]:
        """(value, its end); the end is that of the buffer if more text must be read first."""
        try:
            return DECODER.raw_decode(self.buffer, self.position)
        except JSONDecodeError as error:
            return None, self._incomplete_end(error)
        except (ValueError, RecursionError) as error:
            refused = UserError(_reason(error))
        try:
            return refused, LENIENT_DECODER.raw_decode(self.buffer, self.position)[1]
        except JSONDecodeError as error:
            return None, self._incomplete_end(error)
        except RecursionError:
            raise self.error("nested too deeply") from None

    def _incomplete_end(self, error: JSONDecodeError) -> int:
        """The end of the buffer, if the value may continue after it. Raises: UserError otherwise."""
        incomplete = error.msg.startswith("Unterminated string") or error.pos > len(self.buffer) - MAX_TOKEN
        if self.ended or not incomplete:
            raise self.error(error.msg, error.pos)
        return len(self.buffer)

    def _advance(self, position: int) -> None:
        if position > self.position:
            self.line += self.buffer.count("\n", self.position, position)
            self.position = position

    def _fill(self) -> None:
        """Drop the text before the position and read at least as much as is left: long values then need few scans."""
        start = self.buffer.rfind("\n", 0, self.position) + 1
        self.columns_before = self.position - start + (0 if start else self.columns_before)
        self.buffer = self.buffer[self.position :]
        self.position = 0
        chunk = self.file.read(max(CHUNK_BYTES, len(self.buffer)))
        self.ended = not chunk
        try:
            self.buffer += self.decoder.decode(chunk, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.buffer.count("\n") + error.object.count(b"\n", 0, error.start)
            offset = self.file.tell() - len(error.object) + error.start
            raise UserError(
                f"{self.path}:{line}: got byte 0x{error.object[error.start]:02x} at offset {offset} of the file, "
                "expected UTF-8; convert the file, e.g. with iconv"
            ) from None
