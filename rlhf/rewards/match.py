"""Whether a response gives the right result: a number (GSM8K), a choice, a formula or any text in a column."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlhf.config import Config as Base
from rlhf.errors import UserError
from rlhf.rewards import REFERENCE, Context, Source, columns_of_rows
from rlhf.rewards._comparisons import COMPARISONS
from rlhf.types import Row, Samples

EVERYTHING = re.compile(r"(?s).+")
GROUND_TRUTH = "reward_model.ground_truth"
"""where the data of verl has the right result"""


class Config(Base):
    column: str | None = None
    """column with the right result, or with a list of right results; a.b is the entry b of a column a. By default
    `answer`; if no row has that, `reward_model.ground_truth`, or `reference`, the response in the data"""
    compare: Literal["number", "text", "choice", "words", "f1", "math"] = "number"
    """number: the last number in both, no part of an expression, so that $1,200 equals 1200.00, 3/4 equals 0.75, and
    50% equals 50; text: the texts without regard to case and white space; choice: the last letter of a choice, A to J;
    words: the words without regard to case, punctuation and articles, as SQuAD has it; f1: the F1 of these words; math:
    the formulas by math-verify (extra math), so that 1/sqrt(2) equals sqrt(2)/2"""
    pattern: re.Pattern[str] = EVERYTHING
    """regular expression of the result in a response, without its thought: its last match, or the last group in it,
    counts; by default all of it, unless it was cut. Quote it if it has a #, as in pattern='#### (.+)'"""
    column_pattern: re.Pattern[str] = re.compile(r"(?s)(?:.*####)?(.+)")
    """the same for the column; by default the text after the last ####, or all text if there is none"""
    right: float = Field(1.0, allow_inf_nan=False)
    """score of a match; a result that is partly right (f1) has its share of it, and of `wrong` the rest"""
    wrong: float = Field(0.0, allow_inf_nan=False)
    """score of any other response"""


def build(config: Config, context: Context) -> Source:
    """`right` or `wrong` for each response. One without a result is wrong, as is one that was cut, unless a `pattern`
    finds its result; a row without a result is an error."""
    comparison = COMPARISONS[config.compare]

    def score(samples: Samples) -> Tensor:
        values = []
        ended = samples.rollout.ended | (config.pattern != EVERYTHING)
        results = check_rows(config, samples.rollout.rows)
        for answer, whole, accepted in zip(samples.answers, ended.tolist(), results, strict=True):
            matched = last_match(config.pattern, answer) if whole else None
            result = None if matched is None else comparison.read(matched)
            credit = 0.0 if result is None else max(comparison.credit(result, right) for right in accepted)
            values.append(credit * config.right + (1 - credit) * config.wrong)
        return torch.tensor(values, device=context.device)

    return score


def check_rows(config: Config, rows: Sequence[Row]) -> list[list[Any]]:
    """The right results of each row, normalised. Raises: UserError for a row without one."""
    results = []
    for row, cell in zip(rows, _cells(config.column, rows), strict=True):
        items = cell if isinstance(cell, list | tuple) and cell else [cell]
        results.append([_accepted(item, row, cell, config) for item in items])
    return results


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match of `pattern` in `text`, or of the last group in it."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0][pattern.groups] if last else None


def _accepted(item: object, row: Row, cell: object, config: Config) -> Any:
    text = str(item) if isinstance(item, str | int | float) else ""
    matched = last_match(config.column_pattern, text)
    result = None if matched is None else COMPARISONS[config.compare].read(matched)
    if result is None:
        name = config.column or f"answer' or '{REFERENCE}"
        prompt = row.prompt[-1].content[-60:] if row.prompt else ""
        raise UserError(
            f"reward 'match': column '{name}' of the prompt that ends in {prompt!r}: got {str(cell)[-80:]!r}, in which "
            f"there is no {config.compare} to compare (a part of an expression is none); see the options column, "
            "column_pattern and compare; compare=math reads formulas"
        )
    return result


def _cells(name: str | None, rows: Sequence[Row]) -> list[Any]:
    columns = columns_of_rows(rows)
    for column in ("answer", GROUND_TRUTH, REFERENCE) if name is None else (name,):
        first, *keys = [column] if column in columns else column.split(".")
        cells = columns.get(first, [])
        for key in keys:
            cells = [cell.get(key) if isinstance(cell, dict) else None for cell in cells]
        if any(cell is not None for cell in cells) or (first == column and cells):
            return cells
    raise UserError(
        f"reward 'match': no row has a column '{name or 'answer'}'; have {', '.join(columns) or 'none'}; "
        "name one with column=NAME"
    )
