"""HelpSteer3-Preference (arXiv 2505.11475): dialogues with two responses and a preference: nvidia/HelpSteer3.

overall_preference runs from -3 to 3: below 0 response1 is preferred, above 0 response2, and 0 is a tie. The preferred
side is the demonstration. On the hub, the subset preference is read. Splits: train, validation.
"""

from data.read.columns import as_prompt, first_user_text, read_messages, read_number, select_columns
from data.read.paths import TableConfig, is_hub_id, open_path
from data.read.records import Record, read_text
from data.read.table import Ranked, Table

HUB_IDS = ("nvidia/HelpSteer3",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, path: str) -> Table:
    path = path or HUB_IDS[0]
    if is_hub_id(path) and config.subset is None and config.data_dir is None:
        config = config.model_copy(update={"subset": "preference"})  # the others hold feedback and edits
    return Table(open_path(path), config, parse)


def parse(record: Record, location: str) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = as_prompt(read_messages(record, "context", location))
    first, second = read_text(record, "response1", location), read_text(record, "response2", location)
    preference = read_number(record, "overall_preference", location)
    columns = select_columns(record, "domain", "language", "overall_preference")
    return Ranked(prompt, ((first, -preference), (second, 0.0)), first_user_text(prompt), columns)
