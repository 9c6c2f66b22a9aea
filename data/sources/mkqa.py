"""MKQA (arXiv 2007.15207): 10,000 questions with short answers in 26 languages (github.com/apple/ml-mkqa).

`lang` picks the language. The first answer that is text is the demonstration; questions without one (unanswerable, or
too long to answer) are left out; there are no preferences. All accepted answers become the row's column `answers`, for
reward functions. The hub has only a loading script: give a local file, such as mkqa.jsonl.gz.
"""

from functools import partial
from typing import Literal

from data.read.columns import read_list, read_struct, read_structs, read_value, select_columns, user_prompt
from data.read.paths import TableConfig
from data.read.records import Record, Unusable, read_text
from data.read.table import Table
from data.sources._scripts import open_download
from rlhf.text.messages import require_text
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


def build(config: Config, path: str) -> Table:
    return Table(open_download("mkqa", path, HUB_IDS), config, partial(parse, lang=config.lang))


def parse(record: Record, location: str, lang: Lang) -> Row:
    """Raises: UserError, Unusable."""
    prompt = read_text(read_struct(record, "queries", location), lang, f"{location}: queries")
    answers = read_structs(read_struct(record, "answers", location), lang, f"{location}: answers")
    accepted = list(dict.fromkeys(text for item_location, answer in answers for text in _texts(answer, item_location)))
    if not accepted:
        raise Unusable("no short answer")
    return Row(
        user_prompt(prompt), accepted[0], None, prompt, {**select_columns(record, "example_id"), "answers": accepted}
    )


def _texts(answer: Record, location: str) -> list[str]:
    """The text of one answer and its aliases; empty if the text is null."""
    if read_value(answer, "text", location) is None:
        return []
    aliases = read_list(answer, "aliases", location) if answer.get("aliases") is not None else []
    return [read_text(answer, "text", location), *(require_text(alias, f"{location}: aliases") for alias in aliases)]
