"""HelpSteer3-Preference (arXiv 2505.11475): dialogues with two responses and a preference: nvidia/HelpSteer3.

overall_preference runs from -3 to 3: below 0 response1 is preferred, above 0 response2, and 0 is a tie. The preferred
side is the demonstration. On the hub the subset preference is read. Splits: train, validation.
"""

from data.read.columns import before_response, kept, messages, number, opening
from data.read.places import TableConfig, is_hub_id, open_place
from data.read.records import Record, text
from data.read.table import Ranked, Table

HUB_IDS = ("nvidia/HelpSteer3",)


class Config(TableConfig):
    """Which part of the dataset."""


def build(config: Config, place: str) -> Table:
    place = place or HUB_IDS[0]
    if is_hub_id(place) and config.subset is None and config.data_dir is None:
        config = config.model_copy(update={"subset": "preference"})  # the others hold feedback and edits
    return Table(open_place(place), config, parse)


def parse(record: Record, where: str) -> Ranked:
    """Raises: UserError, Unusable."""
    prompt = before_response(messages(record, "context", where))
    one, other = text(record, "response1", where), text(record, "response2", where)
    preference = number(record, "overall_preference", where)
    columns = kept(record, "domain", "language", "overall_preference")
    return Ranked(prompt, ((one, -preference), (other, 0.0)), opening(prompt), columns)
