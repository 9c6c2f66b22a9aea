"""Votes between two models' conversations (arXiv 2306.05685): lmsys/chatbot_arena_conversations (ask for access).

The side with the vote is preferred, and is the demonstration. Ties are left out. After the first turn each model has
its own conversation, so a pair is used only if both have the same messages before the last response. Split: train.
"""

from data.read.columns import as_prompt, first_user_text, read_choice, read_messages, select_columns
from data.read.paths import TableConfig, open_path
from data.read.records import Record, Unusable
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("lmsys/chatbot_arena_conversations",)
WINNERS = ("model_a", "model_b", "tie", "tie (bothbad)")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    sides = [read_messages(record, column, location) for column in ("conversation_a", "conversation_b")]
    winner = read_choice(record, "winner", location, WINNERS)
    if winner.startswith("tie"):
        raise Unusable("tie")
    chosen, rejected = sides if winner == "model_a" else sides[::-1]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("conversation does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("conversations differ before the last turn")
    prompt = as_prompt(chosen[:-1])
    columns = select_columns(record, "question_id", "language")
    return Row(prompt, chosen[-1].content, rejected[-1].content, first_user_text(prompt), columns)
