"""Questions answered by people and by ChatGPT, in Chinese (arXiv 2301.07597): Hello-SimpleAI/HC3-Chinese.

The first human answer is the demonstration; there are no preferences. The hub page is a loading script: give a local
file, such as all.jsonl. The English Hello-SimpleAI/HC3 has the same columns.
"""

from data.read.columns import asked, items, kept
from data.read.places import TableConfig
from data.read.records import Record, Unusable, checked, text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.types import Row

HUB_IDS = ("Hello-SimpleAI/HC3-Chinese", "Hello-SimpleAI/HC3")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_download("hc3_chinese", place, HUB_IDS), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = text(record, "question", where).strip()
    answers = items(record, "human_answers", where)
    if not answers:
        raise Unusable("no human answer")
    response = checked(answers[0], f"{where}: human_answers[0]").strip()
    return Row(asked(prompt), response, None, prompt, kept(record, "id"))
