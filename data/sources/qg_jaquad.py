"""Questions on Japanese Wikipedia and the sentences that answer them (arXiv 2202.01764, 2210.03992): lmqg/qg_jaquad.

The sentence is the demonstration; there are no preferences. Questions on one paragraph stay in one split. The hub has
only a loading script: give a local file. Splits: train, validation, test.
"""

from data.read.columns import select_columns, user_prompt
from data.read.paths import TableConfig
from data.read.records import Record, read_text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.types import Row

HUB_IDS = ("lmqg/qg_jaquad",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_download("qg_jaquad", path, HUB_IDS), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError."""
    prompt, response, paragraph = (
        read_text(record, column, location) for column in ("question", "sentence", "paragraph")
    )
    return Row(user_prompt(prompt), response, None, paragraph, select_columns(record, "answer"))
