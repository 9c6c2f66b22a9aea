"""Rows written as JSON: one per line, or one array, whose text is in memory while its rows are read.

Python's own decoder accepts NaN and repeated keys, which DECODER refuses.
"""

import re
from collections.abc import Iterator
from json import JSONDecodeError
from types import NoneType

from data.read.records import Record, Skipped
from data.read.remote import DataFile
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER

OPENING = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*+(?!\])")
COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
CLOSING = re.compile(r"[ \t\r\n]*(\[[ \t\r\n]*)?\][ \t\r\n]*")
"""of an array, which has no opening before it but where it is empty"""
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
        value = DECODER.decode(line.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not valid JSON: {_reason(error)}; fix or remove the line") from None
    if type(value) is not dict:
        raise UserError(_not_an_object(value, location))
    return value


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if str(error).startswith("Exceeds the limit") else str(error)


def _not_an_object(value: object, location: str) -> str:
    return f"{location}: got {TYPE_NAMES[type(value)]}, expected an object with named columns"


def parse_array(text: str, path: DataFile) -> Iterator[tuple[str, Record | Skipped]]:
    """(location, record) of each element of an array; a Skipped replaces an element that is not an object.

    Raises: UserError if an element or the array is not valid JSON, because what follows cannot be divided into rows.
    """
    number, line, start, end = 0, 1, 0, 0
    try:
        while opening := (COMMA if number else OPENING).match(text, end):
            number, line, start = number + 1, line + text.count("\n", start, opening.end()), opening.end()
            location = f"{path}:{line}: row {number}"
            value, end = DECODER.raw_decode(text, start)
            yield location, value if type(value) is dict else Skipped(_not_an_object(value, location), bad=True)
        if not CLOSING.fullmatch(text, end):
            raise JSONDecodeError("expected ',' or ']' and then the end of the file; is it cut off?", text, end)
    except (ValueError, RecursionError) as error:
        location = f"{path}:{error.lineno}" if isinstance(error, JSONDecodeError) else location
        raise UserError(f"{location}: not valid JSON: {_reason(error)}; expected one array of objects") from None
