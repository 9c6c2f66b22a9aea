"""The rows of world.py as each stage must have them: shares by digest, ids by hand, and what is cut of a long one.

Written from the docs of the data options; nothing of data/ is used here.
"""

import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.options.world import WORDS
from tests.support import tiny

HUMAN, ASSISTANT = 4, 5
PHASES = ("sft", "reward", "ppo")
Ids = tuple[int, ...]


def ids_of(text: str) -> Ids:
    return tuple(4 + WORDS.index(word) for word in text.split())


@dataclass(frozen=True)
class Row:
    """A prompt of one or more turns, the user's first and last, and two responses."""

    turns: tuple[Ids, ...]
    opening: str
    """what the user says first"""
    chosen: Ids
    rejected: Ids
    margin: float | None

    def prompt(self, turns: Sequence[Ids] | None = None) -> Ids:
        """BOS, each turn after the name of who speaks, and the assistant's name."""
        turns = self.turns if turns is None else turns
        spoken = [i for n, turn in enumerate(turns) for i in ((ASSISTANT if n % 2 else HUMAN), *turn)]
        return (tiny.BOS, *spoken, ASSISTANT)


@functools.cache
def read(path: Path) -> list[Row]:
    return [row_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def row_of(row: dict[str, Any]) -> Row:
    prompt = row.get("prompt", "")
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    sides = (row.get("chosen", row.get("response", "")), row.get("rejected", ""))
    chosen, rejected = ((*ids_of(side), tiny.EOS) for side in sides)
    return Row(tuple(map(ids_of, texts)), texts[0], chosen, rejected, row.get("margin"))


def divided(rows: Sequence[Row], o: dict[str, Any], phase: str) -> tuple[list[Row], list[Row]]:
    """The rows of a phase and those held out, in the order of their digests, as many of each as options allow."""
    train, held_out = [], []
    for row in rows:
        # The files of world.py have no punctuation, no capitals and no opening twice: the text is its own group.
        digest = blake2b(f"{o['data_seed']}\0{row.opening}".encode(), digest_size=24).digest()
        one, other, order = struct.unpack("<3Q", digest)
        if one / 2**64 < o["eval_fraction"]:
            held_out.append((order, row))
            continue
        point, shares = other / 2**64 * sum(o["data_split"]), o["data_split"]
        before = sum(shares[: PHASES.index(phase)])
        if before <= point < before + shares[PHASES.index(phase)]:
            train.append((order, row))
    return tuple(
        [row for _, row in sorted(side, key=lambda pair: pair[0])][:limit]
        for side, limit in ((train, o["max_train_rows"]), (held_out, o["max_eval_rows"]))
    )  # type: ignore[return-value]


def fitted(row: Row, o: dict[str, Any], *responses: Ids) -> Ids | None:
    """The prompt in at most max_prompt_length tokens, and in what responses leave of max_length; None = too long."""
    limit = o["max_prompt_length"]
    if responses:
        limit = min(limit, o["max_length"] - max(map(len, responses)))
    if limit < 1:
        return None
    for first in range(0, len(row.turns), 2):
        prompt = row.prompt(row.turns[first:])
        if len(prompt) <= limit:
            return prompt
    names = len(row.prompt([()]))  # which the template writes around the user's words
    return row.prompt([row.turns[-1][names - limit :]]) if o["truncate"] == "tokens" else None


def fitted_in_phase(row: Row, o: dict[str, Any], phase: str) -> tuple[Ids | None, tuple[Ids, ...]]:
    responses = {"sft": (row.chosen,), "reward": (row.chosen, row.rejected), "ppo": ()}[phase]
    return fitted(row, o, *responses), responses


def items(rows: Sequence[Row], o: dict[str, Any], phase: str) -> list[tuple[Any, ...]]:
    """What a phase makes of rows, those that are too long left out: (ids,), (chosen, rejected, prompt length, margin)
    or (prompt,)."""
    result: list[tuple[Any, ...]] = []
    for row in rows:
        prompt, responses = fitted_in_phase(row, o, phase)
        if prompt is None:
            continue
        sides = [(*prompt, *response) for response in responses]
        result.append({"sft": (*sides,), "reward": (*sides, len(prompt), row.margin), "ppo": (prompt,)}[phase])
    return result
