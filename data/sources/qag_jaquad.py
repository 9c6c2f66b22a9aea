"""Paragraphs of Japanese Wikipedia with questions that they answer (arXiv 2202.01764, 2210.03992): lmqg/qag_jaquad.

The prompt is the first question and the paragraph the demonstration; there are no preferences. The hub has only a
loading script: give a local file. Splits: train, validation, test.
"""

from data.read.columns import read_list, user_prompt
from data.read.paths import TableConfig
from data.read.records import Record, Unusable, read_text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.text.messages import require_text
from rlhf.types import Row

HUB_IDS = ("lmqg/qag_jaquad",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_download("qag_jaquad", path, HUB_IDS), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    questions, paragraph = read_list(record, "questions", location), read_text(record, "paragraph", location)
    if not questions:
        raise Unusable("no question")
    prompt = require_text(questions[0], f"{location}: questions[0]")
    return Row(user_prompt(prompt), paragraph, None, paragraph)
