"""Questions answered by people and by ChatGPT, in Chinese (arXiv 2301.07597): Hello-SimpleAI/HC3-Chinese.

The first human answer is the demonstration; there are no preferences. The hub has only a loading script: give a local
file, such as all.jsonl. The English Hello-SimpleAI/HC3 has the same columns.
"""

from data.read.columns import read_list, select_columns, user_prompt
from data.read.paths import TableConfig
from data.read.records import Record, Unusable, read_text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.text.messages import require_text
from rlhf.types import Row

HUB_IDS = ("Hello-SimpleAI/HC3-Chinese", "Hello-SimpleAI/HC3")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_download("hc3_chinese", path, HUB_IDS), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = read_text(record, "question", location).strip()
    answers = read_list(record, "human_answers", location)
    if not answers:
        raise Unusable("no human answer")
    response = require_text(answers[0], f"{location}: human_answers[0]").strip()
    return Row(user_prompt(prompt), response, None, prompt, select_columns(record, "id"))
