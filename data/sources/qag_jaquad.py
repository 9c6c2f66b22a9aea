"""Paragraphs of Japanese Wikipedia and a question each answers (arXiv 2202.01764, 2210.03992): lmqg/qag_jaquad.

The prompt is the first question and the paragraph the demonstration; there are no preferences. The hub page is a
loading script: give a local file. Splits: train, validation, test.
"""

from data.read.columns import asked, items
from data.read.places import TableConfig
from data.read.records import Record, Unusable, checked, text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.types import Row

HUB_IDS = ("lmqg/qag_jaquad",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_download("qag_jaquad", place, HUB_IDS), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    questions, paragraph = items(record, "questions", where), text(record, "paragraph", where)
    if not questions:
        raise Unusable("no question")
    prompt = checked(questions[0], f"{where}: questions[0]")
    return Row(asked(prompt), paragraph, None, paragraph)
