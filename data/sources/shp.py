"""Stanford Human Preferences (arXiv 2110.08420): Reddit posts with two comments and their votes: stanfordnlp/SHP.

labels 1 prefers human_ref_A, 0 human_ref_B: the comment with more votes although it came no earlier. Its authors
advise pairs whose votes differ by a factor of 2 or more, so others are left out (option `min_score_ratio`). The
preferred comment is the demonstration. `data_dir` picks one subreddit. Splits: train, validation, test.
"""

from functools import partial

from pydantic import Field

from data.read.columns import asked, kept, number, one_of
from data.read.places import TableConfig, open_place
from data.read.records import Record, Unusable, text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("stanfordnlp/SHP",)


class Config(TableConfig):
    """Which pairs are taken."""

    min_score_ratio: float = Field(2.0, ge=1)
    """votes of the preferred comment over those of the other, at least"""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, partial(parse, min_score_ratio=config.min_score_ratio))


def parse(record: Record, where: str, min_score_ratio: float) -> Row:
    """Raises: UserError, Unusable below `min_score_ratio`."""
    prompt, a, b = (text(record, column, where) for column in ("history", "human_ref_A", "human_ref_B"))
    chosen, rejected = (a, b) if one_of(record, "labels", where, (0, 1)) else (b, a)
    if number(record, "score_ratio", where) < min_score_ratio:
        raise Unusable(f"score ratio below {min_score_ratio:g}")
    return Row(asked(prompt), chosen, rejected, prompt, kept(record, "post_id", "domain", "score_ratio"))
