"""HH-RLHF with the prompt in its own column: Dahoas/rm-static, Dahoas/full-hh-rlhf (prompt, chosen, rejected).

The prompt is a dialogue `\\n\\nHuman: ...\\n\\nAssistant:` and becomes turns; the chosen side is the demonstration (the
column response repeats it). Spaces around the responses are removed. Splits: train, test.
"""

from data.read.columns import as_prompt, first_user_text
from data.read.dialogues import parse_transcript
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("Dahoas/rm-static", "Dahoas/full-hh-rlhf")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, parse)


def parse(record: Record, location: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = as_prompt(parse_transcript(read_text(record, "prompt", location), f"{location}: prompt"))
    chosen, rejected = (read_text(record, column, location).strip() for column in ("chosen", "rejected"))
    return Row(prompt, chosen, rejected, first_user_text(prompt))
