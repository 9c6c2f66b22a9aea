"""MKQA (arXiv 2007.15207): 10,000 questions with short answers in 26 languages (github.com/apple/ml-mkqa).

`lang` picks the language. The first answer that is text is the demonstration; questions without one (unanswerable, or
too long to answer) are left out; there are no preferences. All accepted answers go with the row as the column
`answers`, for reward functions. The hub page is a loading script: give a local file, such as mkqa.jsonl.gz.
"""

from functools import partial
from typing import Literal

from data.read.columns import asked, items, kept, struct, structs, value
from data.read.places import TableConfig
from data.read.records import Record, Unusable, checked, text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.types import Row

HUB_IDS = ("apple/mkqa",)

Lang = Literal[
    "ar", "da", "de", "en", "es", "fi", "fr", "he", "hu", "it", "ja", "km", "ko", "ms", "nl", "no", "pl", "pt",
    "ru", "sv", "th", "tr", "vi", "zh_cn", "zh_hk", "zh_tw",
]  # fmt: skip


class Config(TableConfig):
    """Which language."""

    lang: Lang = "zh_cn"
    """language of questions and answers"""


def build(config: Config, place: str) -> Table:
    return Table(open_download("mkqa", place, HUB_IDS), config, partial(parse, lang=config.lang))


def parse(record: Record, where: str, lang: Lang) -> Row:
    """Raises: UserError, Unusable."""
    prompt = text(struct(record, "queries", where), lang, f"{where}: queries")
    answers = structs(struct(record, "answers", where), lang, f"{where}: answers")
    accepted = list(dict.fromkeys(words for at, answer in answers for words in _texts(answer, at)))
    if not accepted:
        raise Unusable("no short answer")
    return Row(asked(prompt), accepted[0], None, prompt, {**kept(record, "example_id"), "answers": accepted})


def _texts(answer: Record, where: str) -> list[str]:
    """The text of one answer and its aliases; none of an answer that is null."""
    if value(answer, "text", where) is None:
        return []
    aliases = items(answer, "aliases", where) if answer.get("aliases") is not None else []
    return [text(answer, "text", where), *(checked(alias, f"{where}: aliases") for alias in aliases)]
