"""Anthropic's HH-RLHF (github.com/anthropics/hh-rlhf): pairs of whole dialogues in the columns chosen and rejected.

The prompt is the dialogue up to the assistant's last turn; the chosen side is the demonstration. `data_dir` picks
harmless-base, helpful-base, helpful-online or helpful-rejection-sampled, and all four without it; red-team-attempts
has no pairs and is refused. Splits: train, test.
"""

from data.read.dialogues import parse_dialogue
from data.read.places import TableConfig, open_place
from data.read.records import Record, text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Row

HUB_IDS = ("Anthropic/hh-rlhf",)
NO_PAIRS = "red-team-attempts holds single transcripts with a rating, got no chosen and rejected; expected data_dir"
DATA_DIRS = "harmless-base, helpful-base, helpful-online or helpful-rejection-sampled"


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    if config.data_dir == "red-team-attempts":
        raise UserError(f"hh_rlhf: data_dir: {NO_PAIRS} {DATA_DIRS}")
    return Table(open_place(place or HUB_IDS[0]), config, parse_pair)


def parse_pair(record: Record, where: str) -> Row:
    """The prompt is the dialogue up to the last turn of the assistant, and the group its first message.

    Two dialogues that part before that have no common prompt, and the row comes without its rejected side (none of
    3,109 rows in samples of harmless-base and helpful-base; 8 before neighbouring turns became one).
    """
    if "transcript" in record and "chosen" not in record:
        raise UserError(f"{where}: transcript: {NO_PAIRS} {DATA_DIRS}")
    chosen = parse_dialogue(text(record, "chosen", where), f"{where}: chosen")
    rejected = parse_dialogue(text(record, "rejected", where), f"{where}: rejected")
    group = chosen[0].content
    if chosen[-1].role != "assistant":
        return Row(chosen, group=group)
    prompt, response = chosen[:-1], chosen[-1].content
    paired = rejected[:-1] == prompt and rejected[-1].role == "assistant"
    return Row(prompt, response, rejected[-1].content if paired else None, group)
