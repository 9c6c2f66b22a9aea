"""Instructions with a better and a worse machine-written response: Dahoas/synthetic-instruct-gptj-pairwise.

Plain text in the columns prompt, chosen, rejected; the chosen side is the demonstration. Split: train.
"""

from data.read.columns import user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("Dahoas/synthetic-instruct-gptj-pairwise",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError."""
    prompt, chosen, rejected = (
        read_text(record, column, location).strip() for column in ("prompt", "chosen", "rejected")
    )
    return Row(user_prompt(prompt), chosen, rejected, prompt)
