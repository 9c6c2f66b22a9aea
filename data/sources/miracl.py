"""MIRACL (arXiv 2210.09984): questions with passages that answer them and passages that do not, in many languages.

Hub: Cohere/miracl-zh-queries-22-12, Cohere/miracl-ja-queries-22-12 and other languages; splits train, dev. The first
positive passage is preferred over the first negative one, and is the demonstration. Either list may be empty: without a
positive passage the row is left out, and without a negative passage it gives no pair.
"""

from data.read.columns import read_structs, select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, Unusable, read_text
from data.read.table import Ranked, Table

HUB_IDS = ("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = read_text(record, "query", location)
    good, bad = (
        [
            read_text(passage, "text", item_location)
            for item_location, passage in read_structs(record, column, location)[:1]
        ]
        for column in ("positive_passages", "negative_passages")
    )
    if not good:
        raise Unusable("no positive passage")
    responses = ((good[0], 1.0), *((passage, 0.0) for passage in bad))
    return Ranked(user_prompt(prompt), responses, prompt, select_columns(record, "query_id"))
