"""JSON as people mean it: without repeated keys, of which Python takes the last, and without NaN, which is no JSON."""

import json
from json import JSONDecodeError, JSONDecoder
from types import NoneType

from rlhf.config import Tree
from rlhf.errors import UserError

TYPE_NAMES = {
    list: "an array",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def _refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> Tree:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(repeated)[:60]} is repeated")
    return record


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"got {constant}, expected a finite number or null")


DECODER = JSONDecoder(object_pairs_hook=_refuse_duplicate_keys, parse_constant=_refuse_constant)
"""raises ValueError, with what is wrong"""


def parse_record(line: str, location: str) -> Tree:
    """The object on one line, which is not blank.

    Raises: UserError if it is not valid JSON, has a repeated key or NaN, or is not an object.
    """
    try:
        value = DECODER.decode(line.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not valid JSON: {reason(error)}; fix or remove the line") from None
    if type(value) is not dict:
        raise UserError(not_an_object(value, location))
    return value


def reason(error: ValueError | RecursionError) -> str:
    """What is wrong, in one line."""
    if isinstance(error, JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if str(error).startswith("Exceeds the limit") else str(error)


def not_an_object(value: object, location: str) -> str:
    """What is said of a row that is another value."""
    return f"{location}: got {TYPE_NAMES[type(value)]}, expected an object with named columns"
