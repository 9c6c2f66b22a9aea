"""PKU-SafeRLHF (arXiv 2406.15513): pairs with one label for the better response and one for the safer.

The two labels are independent and may disagree; `label` says which one prefers. The preferred response is the
demonstration, unsafe though it may be. Whether each response is safe goes with the row. On the hub it is
PKU-Alignment/PKU-SafeRLHF; `subset` picks alpaca-7b, alpaca2-7b or alpaca3-8b. Splits: train, test.
"""

from functools import partial
from typing import Literal

from data.read.columns import asked, kept, one_of
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("PKU-Alignment/PKU-SafeRLHF",)
COLUMNS = ("is_response_0_safe", "is_response_1_safe", "better_response_id", "safer_response_id")

Label = Literal["better", "safer"]


class Config(TableConfig):
    """What is preferred."""

    label: Label = "better"
    """the better (more helpful) or the safer response"""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, partial(parse, label=config.label))


def parse(record: Record, where: str, label: Label) -> Row:
    """Raises: UserError."""
    prompt, one, other = (text(record, column, where) for column in ("prompt", "response_0", "response_1"))
    chosen, rejected = (other, one) if one_of(record, f"{label}_response_id", where, (0, 1)) else (one, other)
    return Row(asked(prompt), chosen, rejected, prompt, kept(record, *COLUMNS))
