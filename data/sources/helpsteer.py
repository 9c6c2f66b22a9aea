"""Responses rated 0 to 4 on five attributes: nvidia/HelpSteer (arXiv 2311.09528), HelpSteer2 (arXiv 2406.08673).

Consecutive rows with one prompt are its responses, ranked by `attribute`: the best is the demonstration, every unequal
pair a preference, and a single response or equal ratings make none. Splits: train, validation. Of HelpSteer2 the
directory preference, whose rows are pairs, is the source helpsteer2_preference.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from data.read.columns import before_response, dialogue, number, opening
from data.read.places import TableConfig, open_place
from data.read.records import Phase, Record, Skipped, text
from data.read.table import Ranked, Table, in_phase
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("nvidia/HelpSteer", "nvidia/HelpSteer2")
MARKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")

Attribute = Literal["helpfulness", "correctness", "coherence", "complexity", "verbosity"]


class Config(TableConfig):
    """How responses are ranked."""

    attribute: Attribute = "helpfulness"
    """the rating that ranks the responses"""


def build(config: Config, place: str) -> Table:
    return Table(open_place(place or HUB_IDS[0]), config, partial(parse, attribute=config.attribute), by_prompt)


def parse(record: Record, where: str, attribute: Attribute) -> Ranked:
    """One response with its rating. Raises: UserError, Unusable."""
    if "preference_strength" in record:
        raise UserError(f"{where}: preference_strength: got pairs, expected ratings; write helpsteer2_preference:PLACE")
    prompt = before_response(parse_turns(text(record, "prompt", where)))
    return Ranked(prompt, ((text(record, "response", where), number(record, attribute, where)),), opening(prompt))


def parse_turns(words: str) -> tuple[Message, ...]:
    """The turns of a prompt: the user's first, then those that `\\n<extra_id_1>Assistant\\n` and `...User\\n` open."""
    first, *parts = MARKER.split(words)
    turns = [("user", first)] if first or not parts else []
    return dialogue([*turns, *((who.lower(), said) for who, said in zip(parts[::2], parts[1::2], strict=True))])


def by_prompt(items: Iterator[Ranked | Skipped], phase: Phase) -> Iterator[Row | Skipped]:
    """Rows of the responses to each prompt; holds no more than those of one."""
    return in_phase(_gathered(items), phase)


def _gathered(items: Iterable[Ranked | Skipped]) -> Iterator[Ranked | Skipped]:
    held: Ranked | None = None
    for item in items:
        if isinstance(item, Skipped):
            yield item
        elif held and held.prompt == item.prompt:
            held = replace(held, responses=held.responses + item.responses)
        else:
            if held:
                yield held
            held = item
    if held:
        yield held
