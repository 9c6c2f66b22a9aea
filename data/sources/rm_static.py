"""HH-RLHF with the prompt split off: Dahoas/rm-static, Dahoas/full-hh-rlhf (columns prompt, chosen, rejected).

The prompt is a dialogue `\\n\\nHuman: ...\\n\\nAssistant:` and becomes turns; the chosen side is the demonstration (the
column response repeats it). Spaces around the responses are dropped. Splits: train, test.
"""

from data.read.columns import before_response, opening
from data.read.dialogues import parse_dialogue
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("Dahoas/rm-static", "Dahoas/full-hh-rlhf")


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, parse)


def parse(record: Record, where: str) -> Row:
    """Raises: UserError, Unusable."""
    prompt = before_response(parse_dialogue(text(record, "prompt", where), f"{where}: prompt"))
    chosen, rejected = (text(record, column, where).strip() for column in ("chosen", "rejected"))
    return Row(prompt, chosen, rejected, opening(prompt))
