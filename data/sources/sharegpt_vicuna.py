"""ShareGPT, Alpaca and OpenAssistant dialogues in Vicuna's format: pvduy/sharegpt_alpaca_oa_vicuna_format.

The prompt, `USER: ... ASSISTANT: ... USER: ... ASSISTANT:`, becomes turns, and label is the demonstration; there are no
preferences. Rows whose prompt or label is null are left out. Splits: train, test.
"""

import re

from data.read.columns import before_response, dialogue, opening, value
from data.read.places import TableConfig, open_place
from data.read.records import Record, Unusable, text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("pvduy/sharegpt_alpaca_oa_vicuna_format",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    if value(record, "prompt", where) is None or value(record, "label", where) is None:
        raise Unusable("null prompt or label")
    response = text(record, "label", where).strip()
    prompt = before_response(parse_turns(text(record, "prompt", where), f"{where}: prompt"))
    return Row(prompt, response, None, opening(prompt))


def parse_turns(words: str, where: str) -> tuple[Message, ...]:
    """The turns that `USER:` and `ASSISTANT:` open, without the spaces around them; text before them is the system's.

    Raises: UserError if nothing opens a turn.
    """
    before, *parts = re.split(r"(?:^|(?<=\s))(USER|ASSISTANT):", words)
    if not parts:
        raise UserError(f"{where}: got text that begins {words[:20]!r}, expected 'USER: ... ASSISTANT:'")
    system = [("system", before.strip())] if before.strip() else []
    turns = ((who.lower(), said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True))
    return dialogue([*system, *turns])
