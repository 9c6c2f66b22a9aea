"""HelpSteer2-Preference (arXiv 2410.01257): pairs with a strength from -3 to 3: nvidia/HelpSteer2, data_dir preference.

Below 0 response_1 is preferred, above 0 response_2, and 0 is a tie; the preferred side is the demonstration. One file
holds both splits: rows whose column `split` is not the option `split` (train; val is validation) are left out.
"""

from functools import partial

from data.read.columns import before_response, kept, number, one_of, opening
from data.read.places import TableConfig, is_hub_id, open_place
from data.read.records import Record, Unusable, text
from data.read.table import Ranked, Table
from data.sources.helpsteer import parse_turns

HUB_ID = "nvidia/HelpSteer2"
HUB_IDS: tuple[str, ...] = ()  # the bare hub id means the ratings, which are the source helpsteer


class Config(TableConfig):
    """Which part of the dataset."""


class Part(TableConfig):
    """What is read of the one file."""

    part: str
    """value of the column `split`"""


def build(config: Config, place: str) -> Table:
    place = place or HUB_ID
    part = config.split or "train"
    data_dir = config.data_dir or ("preference" if is_hub_id(place) else None)
    inside = Part(subset=config.subset, data_dir=data_dir, streaming=config.streaming, part=part)
    return Table(open_place(place), inside, partial(parse, part=part))


def parse(record: Record, where: str, part: str) -> Ranked:
    """Raises: UserError, Unusable for a row of the other split."""
    found = one_of(record, "split", where, ("train", "validation", "val"))
    found = "validation" if found == "val" else found
    prompt = before_response(parse_turns(text(record, "prompt", where)))
    one, other = text(record, "response_1", where), text(record, "response_2", where)
    strength = number(record, "preference_strength", where)
    if found != part:
        raise Unusable(f"of split {found}")
    return Ranked(prompt, ((one, -strength), (other, 0.0)), opening(prompt), kept(record, "preference_strength"))
