"""Dialogues gathered from several preference sets: yitingxie/rlhf-reward-datasets (prompt, chosen, rejected).

The prompt is a dialogue that begins `\\n\\nHuman:` and ends in the human's turn; chosen and rejected begin with the
marker `Assistant:`, which is dropped. The chosen side is the demonstration. Splits: train, test.
"""

from data.read.columns import before_response, opening
from data.read.dialogues import parse_dialogue
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Row

HUB_IDS = ("yitingxie/rlhf-reward-datasets",)
MARKER = "Assistant:"


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = before_response(parse_dialogue(text(record, "prompt", where), f"{where}: prompt"))
    return Row(prompt, _response(record, "chosen", where), _response(record, "rejected", where), opening(prompt))


def _response(record: Record, column: str, where: str) -> str:
    words = text(record, column, where).strip()
    if not words.startswith(MARKER):
        raise UserError(f"{where}: {column}: got text that begins {words[:20]!r}, expected '{MARKER} ...'")
    return words.removeprefix(MARKER).strip()
