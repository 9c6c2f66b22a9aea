"""PKU-SafeRLHF (arXiv 2406.15513): pairs with one label for the better response and one for the safer.

The two labels are independent and may disagree; `label` chooses one. The preferred response is the demonstration, even
if it is unsafe. The labels and the safety of each response become columns of the row. On the hub it is
PKU-Alignment/PKU-SafeRLHF; `subset` picks alpaca-7b, alpaca2-7b or alpaca3-8b. Splits: train, test.
"""

from functools import partial
from typing import Literal

from data.read.columns import read_choice, select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("PKU-Alignment/PKU-SafeRLHF",)
COLUMNS = ("is_response_0_safe", "is_response_1_safe", "better_response_id", "safer_response_id")

Label = Literal["better", "safer"]


class Config(TableConfig):
    """What is preferred."""

    label: Label = "better"
    """the better (more helpful) or the safer response"""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, partial(parse, label=config.label))


def parse(record: Record, location: str, label: Label) -> Row:
    """Raises: UserError."""
    prompt, first, second = (read_text(record, column, location) for column in ("prompt", "response_0", "response_1"))
    chosen, rejected = (
        (second, first) if read_choice(record, f"{label}_response_id", location, (0, 1)) else (first, second)
    )
    return Row(user_prompt(prompt), chosen, rejected, prompt, select_columns(record, *COLUMNS))
