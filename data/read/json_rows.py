"""Rows written as JSON: one per line, or one array, whose text is in memory while its rows are read.

Python's decoder accepts NaN and repeated keys. The hook that refuses them adds 0.4 us to a row of 600 bytes. Passing
the hook to `json.loads` would cost 1.5 us, because it builds a decoder for every call.
"""

import json
import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from types import NoneType

from data.read.records import Record, Skipped
from data.read.remote import DataFile
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER

SPACE = " \t\r\n"
NOT_SPACE = re.compile(rf"[^{SPACE}]")
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


def _parse_line(line: str) -> object:
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


def _not_an_object(value: object, location: str) -> str:
    return f"{location}: got {TYPE_NAMES[type(value)]}, expected an object with named columns"


LENIENT_DECODER = JSONDecoder(parse_int=str, parse_float=str)
"""finds the end of a value that DECODER refuses"""


def parse_array(text: str, path: DataFile) -> Iterator[tuple[str, Record | Skipped]]:
    """(location, record) of each element of an array; a Skipped replaces an element that is not a row.

    Raises: UserError if the array itself is broken, because the following elements cannot be separated.
    """
    position = _skip_space(text, text.index("[") + 1)
    number, line, counted = 0, 1, 0
    separator = "]" if text[position : position + 1] == "]" else ","
    while separator == ",":
        number, line, counted = number + 1, line + text.count("\n", counted, position), position
        location = f"{path}:{line}: row {number}"
        value, end = _read_element(text, position, path)
        if isinstance(value, UserError):
            yield location, Skipped(f"{location}: not valid JSON: {value}; fix or remove the row", bad=True)
        else:
            yield location, value if type(value) is dict else Skipped(_not_an_object(value, location), bad=True)
        position = _skip_space(text, end)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            got = json.dumps(separator) if separator else "the end of the file (is it cut off?)"
            raise _broken(f"got {got}, expected ',' or ']'", text, position, path)
        position = _skip_space(text, position + 1)
    if number == 0:
        position = _skip_space(text, position + 1)
    if position < len(text):
        raise _broken("something follows the array", text, position, path)


def _skip_space(text: str, position: int) -> int:
    match = NOT_SPACE.search(text, position)
    return match.start() if match else len(text)


def _read_element(text: str, position: int, path: DataFile) -> tuple[object, int]:
    """(the value at the position, or a UserError if the value is refused; its end)."""
    try:
        return _raw_decode(DECODER, text, position, path)
    except UserError:
        raise
    except ValueError as error:
        return UserError(_reason(error)), _raw_decode(LENIENT_DECODER, text, position, path)[1]


def _raw_decode(decoder: JSONDecoder, text: str, position: int, path: DataFile) -> tuple[object, int]:
    try:
        return decoder.raw_decode(text, position)
    except JSONDecodeError as error:
        raise _broken(error.msg.removesuffix(" at"), text, error.pos, path) from None
    except RecursionError:
        raise _broken("nested too deeply", text, position, path) from None


def _broken(message: str, text: str, position: int, path: DataFile) -> UserError:
    error = JSONDecodeError(message, text, position)
    return UserError(
        f"{path}:{error.lineno}: not valid JSON: {message} at column {error.colno}; expected one array of objects"
    )
