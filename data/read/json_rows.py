"""Rows written as one array of JSON, whose text is in memory while its rows are read."""

import re
from collections.abc import Iterator
from json import JSONDecodeError

from data.read.records import Record, Skipped
from data.read.remote import DataFile
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER, not_an_object, reason

OPENING = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*+(?!\])")
COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
CLOSING = re.compile(r"[ \t\r\n]*(\[[ \t\r\n]*)?\][ \t\r\n]*")
"""of an array, which has no opening before it but where it is empty"""


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
            yield location, value if type(value) is dict else Skipped(not_an_object(value, location), bad=True)
        if not CLOSING.fullmatch(text, end):
            raise JSONDecodeError("expected ',' or ']' and then the end of the file; is it cut off?", text, end)
    except (ValueError, RecursionError) as error:
        location = f"{path}:{error.lineno}" if isinstance(error, JSONDecodeError) else location
        raise UserError(f"{location}: not valid JSON: {reason(error)}; expected one array of objects") from None
