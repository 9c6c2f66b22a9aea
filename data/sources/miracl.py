"""MIRACL (arXiv 2210.09984): questions with passages that answer them and passages that do not, in many languages.

Hub: Cohere/miracl-zh-queries-22-12, Cohere/miracl-ja-queries-22-12 and their sisters; splits train, dev. The first
positive passage is preferred over the first negative one, and is the demonstration. Either list may be empty: without a
positive passage the row is left out, without a negative one it makes no pair.
"""

from data.read.columns import asked, kept, structs
from data.read.places import TableConfig, open_place
from data.read.records import Record, Unusable, text
from data.read.table import Ranked, Table

HUB_IDS = ("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = text(record, "query", where)
    good, bad = (
        [text(passage, "text", at) for at, passage in structs(record, column, where)[:1]]
        for column in ("positive_passages", "negative_passages")
    )
    if not good:
        raise Unusable("no positive passage")
    responses = ((good[0], 1.0), *((words, 0.0) for words in bad))
    return Ranked(asked(prompt), responses, prompt, kept(record, "query_id"))
