"""Responses rated 0 to 4 on five attributes: nvidia/HelpSteer (arXiv 2311.09528), HelpSteer2 (arXiv 2406.08673).

Consecutive rows with the same prompt are its responses, ranked by `attribute`. The best is the demonstration; each pair
of different rating is a preference. Splits: train, validation.
The pairs of HelpSteer2, in its directory preference, are read by the source helpsteer2_preference.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from data.read.columns import as_prompt, first_user_text, merge_messages, read_number
from data.read.paths import TableConfig, open_path
from data.read.records import Phase, Record, Skipped, read_text
from data.read.table import Ranked, Table, phase_rows
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("nvidia/HelpSteer", "nvidia/HelpSteer2")
MARKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


class Config(TableConfig):
    """How responses are ranked."""

    attribute: Literal["helpfulness", "correctness", "coherence", "complexity", "verbosity"] = "helpfulness"
    """the rating that ranks the responses"""


def build(config: Config, path: str) -> Table:
    return Table(open_path(path or HUB_IDS[0]), config, partial(parse, attribute=config.attribute), rows_by_prompt)


def parse(record: Record, location: str, attribute: str) -> Ranked:
    """One response with its rating. Raises: UserError, Unusable."""
    if "preference_strength" in record:
        raise UserError(
            f"{location}: preference_strength: got pairs, expected ratings; write helpsteer2_preference:PATH"
        )
    prompt = as_prompt(parse_turns(read_text(record, "prompt", location)))
    response, rating = read_text(record, "response", location), read_number(record, attribute, location)
    return Ranked(prompt, ((response, rating),), first_user_text(prompt))


def parse_turns(text: str) -> tuple[Message, ...]:
    """The turns of a prompt: the user's first, then those that `\\n<extra_id_1>Assistant\\n` and `...User\\n` open."""
    first, *parts = MARKER.split(text)
    turns = [Message("user", first)] if first or not parts else []
    later = (Message(role.lower(), turn) for role, turn in zip(parts[::2], parts[1::2], strict=True))
    return merge_messages([*turns, *later])


def rows_by_prompt(items: Iterator[Ranked | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """The rows of each prompt's responses. The responses of only one prompt are in memory."""
    return phase_rows(_merge_by_prompt(items), phase)


def _merge_by_prompt(items: Iterable[Ranked | Skipped]) -> Iterator[Ranked | Skipped]:
    ranked: Ranked | None = None
    for item in items:
        if isinstance(item, Skipped):
            yield item
        elif ranked and ranked.prompt == item.prompt:
            ranked = replace(ranked, responses=ranked.responses + item.responses)
        else:
            if ranked:
                yield ranked
            ranked = item
    if ranked:
        yield ranked
