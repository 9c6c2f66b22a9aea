"""Stanford Human Preferences (arXiv 2110.08420): Reddit posts with two comments and their votes: stanfordnlp/SHP.

Where `labels` is 1, human_ref_A is preferred, else human_ref_B: the comment that has more votes and is not older. The
authors recommend pairs whose votes differ by a factor of at least 2; others are left out (option `min_score_ratio`).
The preferred comment is the demonstration. `data_dir` chooses one subreddit. Splits: train, validation, test.
"""

from functools import partial

from pydantic import Field

from data.read.columns import read_choice, read_number, select_columns, user_prompt
from data.read.paths import TableConfig, open_path
from data.read.records import Record, Unusable, read_text
from data.read.table import Table
from rlhf.types import Row

HUB_IDS = ("stanfordnlp/SHP",)


class Config(TableConfig):
    """Which pairs are used."""

    min_score_ratio: float = Field(2.0, ge=1)
    """votes of the preferred comment over those of the other, at least"""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, partial(parse, min_score_ratio=config.min_score_ratio))


def parse(record: Record, location: str, min_score_ratio: float) -> Row:
    """Raises: UserError, Unusable below `min_score_ratio`."""
    prompt, a, b = (read_text(record, column, location) for column in ("history", "human_ref_A", "human_ref_B"))
    chosen, rejected = (a, b) if read_choice(record, "labels", location, (0, 1)) else (b, a)
    if read_number(record, "score_ratio", location) < min_score_ratio:
        raise Unusable(f"score ratio below {min_score_ratio:g}")
    return Row(
        user_prompt(prompt), chosen, rejected, prompt, select_columns(record, "post_id", "domain", "score_ratio")
    )
