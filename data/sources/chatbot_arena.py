"""Votes between two models' conversations (arXiv 2306.05685): lmsys/chatbot_arena_conversations (ask for access).

The voted side is preferred, and is the demonstration; ties are left out. After the first turn each model answers in
its own conversation, so a pair is taken only where all before the last responses is the same. Only a split train.
"""

from data.read.columns import before_response, kept, messages, one_of, opening
from data.read.places import TableConfig, open_place
from data.read.records import Record, Unusable
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("lmsys/chatbot_arena_conversations",)
WINNERS = ("model_a", "model_b", "tie", "tie (bothbad)")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    sides = [messages(record, column, where) for column in ("conversation_a", "conversation_b")]
    winner = one_of(record, "winner", where, WINNERS)
    if winner.startswith("tie"):
        raise Unusable("tie")
    chosen, rejected = sides if winner == "model_a" else sides[::-1]
    if chosen[-1].role != "assistant" or rejected[-1].role != "assistant":
        raise Unusable("conversation does not end in the assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("conversations part before the last turn")
    prompt = before_response(chosen[:-1])
    columns = kept(record, "question_id", "language")
    return Row(prompt, chosen[-1].content, rejected[-1].content, opening(prompt), columns)
