"""Anthropic's HH-RLHF (github.com/anthropics/hh-rlhf): pairs of whole dialogues in the columns chosen and rejected.

`place` is a file (.jsonl.gz, say), a directory of them, or a hub id; without one it is Anthropic/hh-rlhf.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.reading import Phase, Record, data_files, hub_records, is_hub_id, records, text
from rlhf.config import Config as BaseConfig
from rlhf.config import UserError
from rlhf.types import Message, Row

ROLES = {"Human": "user", "Assistant": "assistant"}


class Config(BaseConfig):
    """Only a hub dataset has splits and data directories; of local files all rows are taken."""

    split: str = "train"
    """split of the hub dataset"""
    data_dir: str | None = None
    """part of the hub dataset, such as harmless-base"""


@dataclass(frozen=True, slots=True)
class HumanPreferences:
    config: Config
    hub_id: str
    files: tuple[Path, ...]

    def rows(self, phase: Phase) -> Iterator[Row]:
        """Every pair, whatever the phase: the chosen side is the demonstration."""
        if self.hub_id:
            for where, record in hub_records(self.hub_id, self.config.split, data_dir=self.config.data_dir):
                yield parse_pair(record, where)
        for file in self.files:
            for where, record in records(file):
                yield parse_pair(record, where)


def build(config: Config, place: str) -> HumanPreferences:
    place = place or "Anthropic/hh-rlhf"
    if is_hub_id(place):
        return HumanPreferences(config, place, ())
    return HumanPreferences(config, "", tuple(data_files(place)))


def parse_pair(record: Record, where: str) -> Row:
    """The prompt is the dialogue up to the last turn of the assistant, and the group its first message.

    Two dialogues that part before that have no common prompt, and the row comes without its rejected side (none of
    3,109 rows in samples of harmless-base and helpful-base; 8 before neighbouring turns became one).
    """
    chosen = parse_dialogue(text(record, "chosen", where), f"{where}: chosen")
    rejected = parse_dialogue(text(record, "rejected", where), f"{where}: rejected")
    group = chosen[0].content
    if chosen[-1].role != "assistant":
        return Row(chosen, group=group)
    prompt, response = chosen[:-1], chosen[-1].content
    paired = rejected[:-1] == prompt and rejected[-1].role == "assistant"
    return Row(prompt, response, rejected[-1].content if paired else None, group)


def parse_dialogue(dialogue: str, where: str) -> tuple[Message, ...]:
    """The turns of a dialogue written as `\\n\\nHuman: ...\\n\\nAssistant: ...`, without the spaces around them.

    Neighbouring turns of one speaker, which a turn that quotes a marker leaves behind, become one.
    Raises: UserError if the text does not begin with a human's turn.
    """
    before, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", dialogue)
    if before.strip() or not parts or parts[0] != "Human":
        raise UserError(f"{where}: got text that begins {dialogue[:20]!r}, expected a dialogue: '\\n\\nHuman: ...'")
    turns: list[Message] = []
    for speaker, words in zip(parts[::2], parts[1::2], strict=True):
        role, content = ROLES[speaker], words.strip()
        if turns and turns[-1].role == role:
            content = f"{turns.pop().content}\n\n{content}".strip()
        turns.append(Message(role, content))
    return tuple(turns)
