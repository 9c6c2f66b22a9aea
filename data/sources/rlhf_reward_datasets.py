"""Dialogues from several preference sets: yitingxie/rlhf-reward-datasets (prompt, chosen, rejected).

The prompt is a dialogue that begins `\\n\\nHuman:` and ends in the human's turn; chosen and rejected begin with the
marker `Assistant:`, which is dropped. The chosen side is the demonstration. Splits: train, test.
"""

from data.read.columns import as_prompt, first_user_text
from data.read.dialogues import parse_transcript
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Row

HUB_IDS = ("yitingxie/rlhf-reward-datasets",)
MARKER = "Assistant:"


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = as_prompt(parse_transcript(read_text(record, "prompt", location), f"{location}: prompt"))
    return Row(
        prompt, _response(record, "chosen", location), _response(record, "rejected", location), first_user_text(prompt)
    )


def _response(record: Record, column: str, location: str) -> str:
    text = read_text(record, column, location).strip()
    if not text.startswith(MARKER):
        raise UserError(f"{location}: {column}: got text that begins {text[:20]!r}, expected '{MARKER} ...'")
    return text.removeprefix(MARKER).strip()
