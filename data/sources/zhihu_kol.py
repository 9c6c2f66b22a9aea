"""Questions and answers of Zhihu, in Chinese: wangrui6/Zhihu-KOL (INSTRUCTION, RESPONSE).

A row is a demonstration or a prompt; there are no preferences. METADATA, JSON text with the upvotes, becomes a column
of the row. Split: train.
"""

from data.read.columns import select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("wangrui6/Zhihu-KOL",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError."""
    prompt, response = (read_text(record, column, location).strip() for column in ("INSTRUCTION", "RESPONSE"))
    return Row(user_prompt(prompt), response, None, prompt, select_columns(record, "METADATA"))
