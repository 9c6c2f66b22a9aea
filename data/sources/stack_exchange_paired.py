"""Stack Exchange in pairs, as Markdown, at most ten to a question: lvwerra/stack-exchange-paired.

response_j is preferred over response_k and is the demonstration. `data_dir` picks a part: data/finetune, data/reward,
data/rl, data/evaluation.
"""

from data.read.columns import asked, kept
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("lvwerra/stack-exchange-paired",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError."""
    prompt, chosen, rejected = (text(record, column, where) for column in ("question", "response_j", "response_k"))
    return Row(asked(prompt), chosen, rejected, prompt, kept(record, "qid"))
