"""WebGPT comparisons (arXiv 2112.09332): questions with two researched answers: openai/webgpt_comparisons.

The answer with the higher score is preferred, and is the demonstration; equal scores are a tie. Citations such as [1]
are removed, because the cited texts are not in the prompt. The hub has only a loading script: give a local file.
"""

import re

from data.read.columns import read_number, read_struct, user_prompt
from data.read.paths import TableConfig
from data.read.records import Record, read_text
from data.read.table import Ranked, Table
from data.sources._scripts import open_download

HUB_IDS = ("openai/webgpt_comparisons",)
CITATION = re.compile(r"[ \t]*\[\d+(?:[,\s]+\d+)*\]")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_download("webgpt", path, HUB_IDS), config, parse)


def parse(record: Record, location: str) -> Ranked:
    """Raises: UserError."""
    question = read_struct(record, "question", location)
    prompt = read_text(question, "full_text", f"{location}: question")
    sides = (("answer_0", "score_0"), ("answer_1", "score_1"))
    responses = [
        (CITATION.sub("", read_text(record, answer, location)).strip(), read_number(record, score, location))
        for answer, score in sides
    ]
    return Ranked(user_prompt(prompt), tuple(responses), prompt, {"question_id": question.get("id")})
