"""Whether a response gives the right result, which a column of the data has: a number (GSM8K), or any text."""

import re
from collections import deque
from decimal import Decimal
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import REFERENCE, Context, Source, columns_of
from rlhf.types import Samples

# A hyphen between words or digits (3-4) is no sign, and a comma parts thousands only where three digits follow.
NUMBER = re.compile(r"((?:(?<![\w)])[-\N{MINUS SIGN}])?)[$€£¥]?((?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


class Config(Base):
    column: str | None = None
    """column with the right result, or a list of such; by default `answer`, and where no row has that, `reference`,
    the response that the data has"""
    compare: Literal["number", "text"] = "number"
    """number: the last one on either side, by value, so that $1,200 is 1200.00; text: all of it, but for case and
    white space"""
    pattern: str = r"(?s).+"
    """regular expression of what counts in the response: its last match, or the group in it; by default everything.
    Quote it where it has a #, as in pattern='#### (.+)'"""
    column_pattern: str = r"(?s)(?:.*####)?(.+)"
    """the same for the column; by default what follows the last ####, and everything where there is none"""
    right: float = Field(1.0, allow_inf_nan=False)
    """score of a match"""
    wrong: float = Field(0.0, allow_inf_nan=False)
    """score of anything else"""

    @field_validator("pattern", "column_pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups > 1:
            raise ValueError(f"a regular expression with {groups} groups, expected one at most; (?:...) makes none")
        return pattern


def build(config: Config, context: Context) -> Source:
    """`right` or `wrong` for each response; a response without a result is wrong, a row without one is a mistake."""
    compared = number if config.compare == "number" else plain

    def score(samples: Samples) -> Tensor:
        values = []
        for response, cell in zip(samples.responses, _cells(config.column, samples), strict=True):
            accepted = [_accepted(item, cell, config, compared) for item in (cell if _several(cell) else [cell])]
            said = found(config.pattern, response)
            result = None if said is None else compared(said)
            values.append(config.right if result is not None and result in accepted else config.wrong)
        return torch.tensor(values, device=context.device)

    return score


def found(pattern: str, text: str) -> str | None:
    """The last match of `pattern` in `text`, or of the group in it."""
    last = deque(re.finditer(pattern, text), maxlen=1)
    return last[0][last[0].re.groups] if last else None


def number(text: str) -> Decimal | None:
    """The last number in `text`, without currency and commas between thousands."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return Decimal(("-" if sign else "") + digits.replace(",", ""))


def plain(text: str) -> str | None:
    """`text` in one case and with single spaces; None if nothing is left."""
    return " ".join(text.split()).casefold() or None


def _several(cell: Any) -> bool:
    return isinstance(cell, list | tuple) and len(cell) > 0


def _accepted(item: Any, cell: Any, config: Config, compared: Any) -> Any:
    text = str(item) if isinstance(item, str | int) else ""
    if isinstance(item, float):
        text = f"{Decimal(str(item)):f}"  # without an exponent, whose digits are no number
    part = found(config.column_pattern, text)
    result = None if part is None else compared(part)
    if result is None:
        name = config.column or f"answer' or '{REFERENCE}"
        raise UserError(
            f"reward 'match': column '{name}': got {str(cell)[-80:]!r}, in which there is no {config.compare} to "
            "compare; see the options column, column_pattern and compare"
        )
    return result


def _cells(name: str | None, samples: Samples) -> list[Any]:
    columns = columns_of(samples)
    for known in ("answer", REFERENCE) if name is None else (name,):
        if known in columns:
            return columns[known]
    raise UserError(
        f"reward 'match': no row has a column '{name or 'answer'}'; have {', '.join(columns) or 'none'}; "
        "name one with column=NAME"
    )
