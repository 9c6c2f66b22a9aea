"""Instructions with a better and a worse machine-written response: Dahoas/synthetic-instruct-gptj-pairwise.

Plain text in the columns prompt, chosen, rejected; the chosen side is the demonstration. Only a split train.
"""

from data.read.columns import asked
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("Dahoas/synthetic-instruct-gptj-pairwise",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError."""
    prompt, chosen, rejected = (text(record, column, where).strip() for column in ("prompt", "chosen", "rejected"))
    return Row(asked(prompt), chosen, rejected, prompt)
