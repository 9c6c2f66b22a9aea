"""Stack Exchange in pairs, as Markdown, at most ten to a question: lvwerra/stack-exchange-paired.

response_j is preferred over response_k and is the demonstration. `data_dir` chooses a part: data/finetune, data/reward,
data/rl, data/evaluation.
"""

from data.read.columns import select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("lvwerra/stack-exchange-paired",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError."""
    prompt, chosen, rejected = (
        read_text(record, column, location) for column in ("question", "response_j", "response_k")
    )
    return Row(user_prompt(prompt), chosen, rejected, prompt, select_columns(record, "qid"))
