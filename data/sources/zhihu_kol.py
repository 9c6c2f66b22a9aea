"""Questions and answers of Zhihu, in Chinese: wangrui6/Zhihu-KOL (INSTRUCTION, RESPONSE).

A row is a demonstration or a prompt; there are no preferences. METADATA, JSON text with the upvotes, goes with the row.
Only a split train.
"""

from data.read.columns import asked, kept
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("wangrui6/Zhihu-KOL",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError."""
    prompt, response = (text(record, column, where).strip() for column in ("INSTRUCTION", "RESPONSE"))
    return Row(asked(prompt), response, None, prompt, kept(record, "METADATA"))
