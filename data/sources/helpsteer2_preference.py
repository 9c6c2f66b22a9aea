"""HelpSteer2-Preference (arXiv 2410.01257): pairs with a strength from -3 to 3: nvidia/HelpSteer2, data_dir preference.

Below 0 response_1 is preferred, above 0 response_2, and 0 is a tie; the preferred side is the demonstration. One file
holds both splits: rows whose column `split` is not the option `split` (train; val is validation) are left out.
"""

from functools import partial

from data.read.columns import as_prompt, first_user_text, read_choice, read_number, select_columns
from data.read.paths import TableConfig, is_hub_id, open_path
from data.read.records import Record, Unusable, read_text
from data.read.table import Ranked, Table
from data.sources.helpsteer import parse_turns

HUB_ID = "nvidia/HelpSteer2"
HUB_IDS: tuple[str, ...] = ()  # the bare hub id means the ratings, which are the source helpsteer


class Config(TableConfig):
    """Which part of the dataset."""


class FileConfig(TableConfig):
    """Which file, and which of its rows."""

    row_split: str
    """value of the column `split`"""


def build(config: Config, path: str) -> Table:
    path = path or HUB_ID
    split = "validation" if config.split == "val" else config.split or "train"
    data_dir = config.data_dir or ("preference" if is_hub_id(path) else None)
    table_config = FileConfig(subset=config.subset, data_dir=data_dir, streaming=config.streaming, row_split=split)
    return Table(open_path(path), table_config, partial(parse, split=split))


def parse(record: Record, location: str, split: str) -> Ranked:
    """Raises: UserError, Unusable for a row of the other split."""
    row_split = read_choice(record, "split", location, ("train", "validation", "val"))
    row_split = "validation" if row_split == "val" else row_split
    prompt = as_prompt(parse_turns(read_text(record, "prompt", location)))
    first, second = read_text(record, "response_1", location), read_text(record, "response_2", location)
    strength = read_number(record, "preference_strength", location)
    if row_split != split:
        raise Unusable(f"of split {row_split}")
    return Ranked(
        prompt,
        ((first, -strength), (second, 0.0)),
        first_user_text(prompt),
        select_columns(record, "preference_strength"),
    )
