"""A generated dataset with a known true score, which no stage trains on: describe the animal of the prompt, kindly.

    prompt     tell me about the red fox in the forest
    response   the red fox is kind and calm and brave .

A response names the animal with SLOTS adjectives. Demonstrations use all adjectives equally often, so fine-tuning
scores about 0. Preferences prefer the kinder response. `true_score` measures what PPO has learned.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

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
KINDS = {
    **{"owl": "bird", "duck": "bird", "swan": "bird", "crow": "bird"},
    **{"cat": "tame", "dog": "tame", "horse": "tame", "goat": "tame"},
}
"""the group of an animal; all others are wild"""
LOCATIONS = ("forest", "garden", "valley", "village", "river", "field")
ADJECTIVES = {
    1: ("kind", "calm", "brave", "gentle", "honest", "cheerful"),
    0: ("tall", "quiet", "young", "busy", "plain", "sleepy"),
    -1: ("rude", "mean", "cruel", "lazy", "greedy", "nasty"),
}
WORTH = {word: worth for worth, words in ADJECTIVES.items() for word in words}
SLOTS = 3


class Config(BaseConfig):
    """Size of the dataset."""

    rows: int = Field(6000, ge=1)
    """rows before they are divided among the phases and evaluation"""
    seed: int = 0
    malformed: float = Field(0.25, ge=0, le=1)
    """share of the preferences whose rejected side names another animal or is not a correct sentence"""


@dataclass(frozen=True, slots=True)
class Subject:
    colour: str
    animal: str
    location: str

    @property
    def prompt(self) -> str:
        return f"tell me about the {self.colour} {self.animal} in the {self.location}"

    def respond(self, adjectives: Sequence[str]) -> str:
        return f"the {self.colour} {self.animal} is {' and '.join(adjectives)} ."


SUBJECTS = tuple(Subject(*parts) for parts in product(COLOURS, ANIMALS, LOCATIONS))


@dataclass(frozen=True, slots=True)
class Demo:
    config: Config

    def rows(self, phase: Phase) -> Iterator[Row]:
        """`config.rows` rows; row i of each phase has the same prompt. For ppo no prompt is repeated."""
        order = random.Random(self.config.seed).sample(SUBJECTS, len(SUBJECTS))
        count = min(self.config.rows, len(order)) if phase == "ppo" else self.config.rows
        for i in range(count):
            subject = order[i % len(order)]
            rng = random.Random(f"{self.config.seed}:{phase}:{i}")
            prompt, columns = (Message("user", subject.prompt),), {"group": KINDS.get(subject.animal, "wild")}
            if phase == "ppo":
                yield Row(prompt, columns=columns)
            elif phase == "sft":
                yield Row(prompt, subject.respond(_adjectives(rng)))
            else:
                yield Row(prompt, *_pair(subject, rng, self.config.malformed), columns=columns)

    def fingerprint(self, phase: Phase) -> str:
        """A text that changes whenever the rows change: a digest of this file and the config."""
        return hashlib.sha256(Path(__file__).read_bytes() + repr((phase, self.config)).encode()).hexdigest()


def build(config: Config, path: str) -> Demo:
    if path:
        raise UserError(f"demo:{path}: the demo is generated, got a path; write demo or demo,rows=1000")
    return Demo(config)


def true_score(prompts: Sequence[str], responses: Sequence[str], **columns: object) -> list[float]:
    """The mean value of a response's adjectives, in [-1, 1]; -1 for another animal or an incorrect sentence.

    Raises: UserError if a prompt is not one of the demo's.
    """
    return [_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def words() -> tuple[str, ...]:
    """Every word of the dataset."""
    frame = ("tell", "me", "about", "the", "in", "is", "and", ".")
    return (*frame, *COLOURS, *ANIMALS, *LOCATIONS, *WORTH)


def _score(prompt: str, response: str) -> float:
    subjects = re.findall(r"tell me about the (\w+) (\w+) in the \w+", prompt)
    if not subjects:
        raise UserError(f"demo: got the prompt {prompt[:80]!r}, expected 'tell me about the red fox in the forest'")
    colour, animal = subjects[-1]
    slots = " and ".join([r"(\w+)"] * SLOTS)
    match = re.fullmatch(rf"the {colour} {animal} is {slots} \.", " ".join(response.split()))
    if not match or not all(word in WORTH for word in match.groups()):
        return -1.0
    return sum(WORTH[word] for word in match.groups()) / SLOTS


def _adjectives(rng: random.Random) -> list[str]:
    return rng.choices(list(WORTH), k=SLOTS)


def _pair(subject: Subject, rng: random.Random, malformed: float) -> tuple[str, str]:
    """(chosen response, rejected response)."""
    spoil = rng.random() < malformed
    while True:
        chosen, rejected = subject.respond(_adjectives(rng)), subject.respond(_adjectives(rng))
        if spoil:
            rejected = _spoil(rejected, subject, rng)
        high, low = (_score(subject.prompt, text) for text in (chosen, rejected))
        if high > low:
            return chosen, rejected


def _spoil(response: str, subject: Subject, rng: random.Random) -> str:
    """A response about another animal, or a sentence with a missing, additional or misplaced word."""
    tokens = response.split()
    kind = rng.randrange(5)
    if kind == 0:
        tokens[2] = rng.choice([animal for animal in ANIMALS if animal != subject.animal])
    elif kind == 1:
        tokens[1] = rng.choice([colour for colour in COLOURS if colour != subject.colour])
    elif kind == 2:
        del tokens[rng.randrange(len(tokens))]
    elif kind == 3:
        i = rng.randrange(len(tokens))
        tokens.insert(i, rng.choice([tokens[i], *WORTH]))
    else:
        i = rng.randrange(len(tokens) - 1)
        tokens[i], tokens[i + 1] = tokens[i + 1], tokens[i]
    return " ".join(tokens)
