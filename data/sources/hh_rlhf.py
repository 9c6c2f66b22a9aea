"""Anthropic's HH-RLHF (github.com/anthropics/hh-rlhf): pairs of whole dialogues in the columns chosen and rejected.

The prompt is the dialogue up to the assistant's last turn; the chosen side is the demonstration. `data_dir` picks
harmless-base, helpful-base, helpful-online or helpful-rejection-sampled, and all four without it; red-team-attempts has
no pairs and is refused. Splits: train, test.
"""

from data.read.dialogues import parse_transcript
from data.read.paths import TableConfig, open_path
from data.read.records import Record, read_text
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Row

HUB_IDS = ("Anthropic/hh-rlhf",)
NO_PAIRS = "red-team-attempts holds single transcripts with a rating, got no chosen and rejected; expected data_dir"
DATA_DIRS = "harmless-base, helpful-base, helpful-online or helpful-rejection-sampled"


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    if config.data_dir == "red-team-attempts":
        raise UserError(f"hh_rlhf: data_dir: {NO_PAIRS} {DATA_DIRS}")
    return Table(open_path(path or HUB_IDS[0]), config, parse_pair)


def parse_pair(record: Record, location: str) -> Row:
    """The prompt is the dialogue up to the last turn of the assistant, and the group its first message.

    If the two dialogues differ before that turn, they have no common prompt, and the row has no rejected side (none of
    3,109 rows in samples of harmless-base and helpful-base; 8 if consecutive turns of one speaker are not merged).
    """
    if "transcript" in record and "chosen" not in record:
        raise UserError(f"{location}: transcript: {NO_PAIRS} {DATA_DIRS}")
    chosen = parse_transcript(read_text(record, "chosen", location), f"{location}: chosen")
    rejected = parse_transcript(read_text(record, "rejected", location), f"{location}: rejected")
    group = chosen[0].content
    if chosen[-1].role != "assistant":
        return Row(chosen, group=group)
    prompt, response = chosen[:-1], chosen[-1].content
    paired = rejected[:-1] == prompt and rejected[-1].role == "assistant"
    return Row(prompt, response, rejected[-1].content if paired else None, group)
