"""ShareGPT, Alpaca and OpenAssistant dialogues in Vicuna's format: pvduy/sharegpt_alpaca_oa_vicuna_format.

The prompt, `USER: ... ASSISTANT: ... USER: ... ASSISTANT:`, becomes turns. The column label is the demonstration; there
are no preferences. Rows whose prompt or label is null are left out. Splits: train, test.
"""

import re

from data.read.columns import as_prompt, first_user_text, merge_turns, read_value
from data.read.paths import TableConfig, open_path
from data.read.records import Record, Unusable, read_text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("pvduy/sharegpt_alpaca_oa_vicuna_format",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    if read_value(record, "prompt", location) is None or read_value(record, "label", location) is None:
        raise Unusable("null prompt or label")
    response = read_text(record, "label", location).strip()
    prompt = as_prompt(parse_turns(read_text(record, "prompt", location), f"{location}: prompt"))
    return Row(prompt, response, None, first_user_text(prompt))


def parse_turns(text: str, location: str) -> tuple[Message, ...]:
    """The turns that `USER:` and `ASSISTANT:` open, without the spaces around them; text before the first is the system
    message.

    Raises: UserError if there is no turn.
    """
    before, *parts = re.split(r"(?:^|(?<=\s))(USER|ASSISTANT):", text)
    if not parts:
        raise UserError(f"{location}: got text that begins {text[:20]!r}, expected 'USER: ... ASSISTANT:'")
    system = [("system", before.strip())] if before.strip() else []
    turns = ((role.lower(), turn.strip()) for role, turn in zip(parts[::2], parts[1::2], strict=True))
    return merge_turns([*system, *turns])
