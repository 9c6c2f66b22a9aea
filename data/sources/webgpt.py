"""WebGPT comparisons (arXiv 2112.09332): questions with two researched answers: openai/webgpt_comparisons.

The answer with the higher score is preferred, and is the demonstration; equal scores are a tie. Citations such as [1]
are taken out, since what they cite is not in the prompt. The hub page is a loading script: give a local file.
"""

import re

from data.read.columns import asked, number, struct
from data.read.places import TableConfig
from data.read.records import Record, text
from data.read.table import Ranked, Table
from data.sources._scripts import open_download

HUB_IDS = ("openai/webgpt_comparisons",)
CITATION = re.compile(r"[ \t]*\[\d+(?:[,\s]+\d+)*\]")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_download("webgpt", place, HUB_IDS), config, parse)


def parse(record: Record, where: str) -> Ranked:
    """Raises: UserError."""
    question = struct(record, "question", where)
    prompt = text(question, "full_text", f"{where}: question")
    sides = (("answer_0", "score_0"), ("answer_1", "score_1"))
    responses = [
        (CITATION.sub("", text(record, words, where)).strip(), number(record, score, where)) for words, score in sides
    ]
    return Ranked(asked(prompt), tuple(responses), prompt, {"question_id": question.get("id")})
