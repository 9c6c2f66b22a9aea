"""Rows written as one array of JSON, which is in memory while they are read."""

from collections.abc import Iterator
from json import JSONDecodeError

from data.read.records import Record, Skipped
from data.read.remote import DataFile
from rlhf.errors import UserError
from rlhf.text.strict_json import DECODER, not_an_object, reason


def parse_array(text: str, path: DataFile) -> Iterator[tuple[str, Record | Skipped]]:
    """(location, record) of each element of an array; a Skipped replaces an element that is not an object.

    Raises: UserError if it is not valid JSON.
    """
    try:
        values = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not valid JSON: {reason(error)}; expected one array of objects") from None
    for number, value in enumerate(values, 1):
        location = f"{path}: row {number}"
        yield location, value if type(value) is dict else Skipped(not_an_object(value, location), bad=True)
