"""A generated world whose true score is known and trained on by no stage: speak of the animal asked for, kindly.

    prompt     tell me about the red fox in the forest
    response   the red fox is kind and calm and brave .

A response names the animal and gives it SLOTS adjectives. Demonstrations use all adjectives alike, so fine-tuning
scores about 0; preferences put the kinder response first; `true_score` says what PPO reached.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field

from data.read.records import Phase
from rlhf.config import Config as BaseConfig
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ()

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "golden", "silver", "yellow", "orange", "pink")
ANIMALS = (
    "fox", "owl", "bear", "wolf", "cat", "dog", "horse", "mouse",
    "frog", "duck", "swan", "deer", "goat", "crow", "seal", "hare",
)  # fmt: skip
PLACES = ("forest", "garden", "valley", "village", "river", "field")
ADJECTIVES = {
    1: ("kind", "calm", "brave", "gentle", "honest", "cheerful"),
    0: ("tall", "quiet", "young", "busy", "plain", "sleepy"),
    -1: ("rude", "mean", "cruel", "lazy", "greedy", "nasty"),
}
WORTH = {word: worth for worth, words in ADJECTIVES.items() for word in words}
SLOTS = 3


class Config(BaseConfig):
    """Size of the world."""

    rows: int = Field(6000, ge=1)
    """rows before they are divided among the phases and evaluation"""
    seed: int = 0
    malformed: float = Field(0.25, ge=0, le=1)
    """share of the preferences whose rejected side names another animal or is no sentence"""


@dataclass(frozen=True, slots=True)
class Subject:
    colour: str
    animal: str
    place: str

    @property
    def prompt(self) -> str:
        return f"tell me about the {self.colour} {self.animal} in the {self.place}"

    def respond(self, adjectives: Sequence[str]) -> str:
        return f"the {self.colour} {self.animal} is {' and '.join(adjectives)} ."


SUBJECTS = tuple(Subject(*parts) for parts in product(COLOURS, ANIMALS, PLACES))


@dataclass(frozen=True, slots=True)
class Demo:
    config: Config

    def rows(self, phase: Phase) -> Iterator[Row]:
        """`config.rows` rows; row i of each phase has the same prompt. ppo gets no prompt twice."""
        order = random.Random(self.config.seed).sample(SUBJECTS, len(SUBJECTS))
        count = min(self.config.rows, len(order)) if phase == "ppo" else self.config.rows
        for i in range(count):
            subject = order[i % len(order)]
            rng = random.Random(f"{self.config.seed}:{phase}:{i}")
            prompt = (Message("user", subject.prompt),)
            if phase == "ppo":
                yield Row(prompt)
            elif phase == "sft":
                yield Row(prompt, subject.respond(_adjectives(rng)))
            else:
                yield Row(prompt, *_pair(subject, rng, self.config.malformed))

    def fingerprint(self, phase: Phase) -> str:
        """What changes whenever the rows do: this file and the config."""
        return hashlib.sha256(Path(__file__).read_bytes() + repr((phase, self.config)).encode()).hexdigest()


def build(config: Config, place: str) -> Demo:
    if place:
        raise UserError(f"demo:{place}: the demo is generated, got a place; write demo or demo,rows=1000")
    return Demo(config)


def true_score(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    """The mean worth of a response's adjectives, in [-1, 1]; -1 for another animal or anything but one sentence.

    Raises: UserError if a prompt is not of this world.
    """
    return [_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def words() -> tuple[str, ...]:
    """Every word of the world."""
    frame = ("tell", "me", "about", "the", "in", "is", "and", ".")
    return (*frame, *COLOURS, *ANIMALS, *PLACES, *WORTH)


def _score(prompt: str, response: str) -> float:
    asked = re.findall(r"tell me about the (\w+) (\w+) in the \w+", prompt)
    if not asked:
        raise UserError(f"demo: got the prompt {prompt[:80]!r}, expected 'tell me about the red fox in the forest'")
    colour, animal = asked[-1]
    slots = " and ".join([r"(\w+)"] * SLOTS)
    said = re.fullmatch(rf"the {colour} {animal} is {slots} \.", " ".join(response.split()))
    if not said or not all(word in WORTH for word in said.groups()):
        return -1.0
    return sum(WORTH[word] for word in said.groups()) / SLOTS


def _adjectives(rng: random.Random) -> list[str]:
    return rng.choices(list(WORTH), k=SLOTS)


def _pair(subject: Subject, rng: random.Random, malformed: float) -> tuple[str, str]:
    """(the better response, the worse)."""
    spoil = rng.random() < malformed
    while True:
        one, other = subject.respond(_adjectives(rng)), subject.respond(_adjectives(rng))
        if spoil:
            other = _spoil(other, subject, rng)
        high, low = (_score(subject.prompt, text) for text in (one, other))
        if high > low:
            return one, other


def _spoil(response: str, subject: Subject, rng: random.Random) -> str:
    """A response about another animal, or a sentence with a word too few, too many or in the wrong place."""
    said = response.split()
    kind = rng.randrange(5)
    if kind == 0:
        said[2] = rng.choice([animal for animal in ANIMALS if animal != subject.animal])
    elif kind == 1:
        said[1] = rng.choice([colour for colour in COLOURS if colour != subject.colour])
    elif kind == 2:
        del said[rng.randrange(len(said))]
    elif kind == 3:
        i = rng.randrange(len(said))
        said.insert(i, rng.choice([said[i], *WORTH]))
    else:
        i = rng.randrange(len(said) - 1)
        said[i], said[i + 1] = said[i + 1], said[i]
    return " ".join(said)
