"""Questions on Japanese Wikipedia and the sentences that answer them (arXiv 2202.01764, 2210.03992): lmqg/qg_jaquad.

The sentence is the demonstration; there are no preferences. Questions on one paragraph stay in one split. The hub page
is a loading script: give a local file. Splits: train, validation, test.
"""

from data.read.columns import asked, kept
from data.read.places import TableConfig
from data.read.records import Record, text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.types import Row

HUB_IDS = ("lmqg/qg_jaquad",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_download("qg_jaquad", place, HUB_IDS), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError."""
    prompt, response, paragraph = (text(record, column, where) for column in ("question", "sentence", "paragraph"))
    return Row(asked(prompt), response, None, paragraph, kept(record, "answer"))
