"""Film-review sentences, positive and negative (Pang and Lee 2005): continue a sentence, in a positive way.

`path` is a directory with rt-polarity.pos and rt-polarity.neg (.gz too), or a hub id or file with the columns text and
label, such as cornell-movie-review-data/rotten_tomatoes. Fine-tuning learns to continue sentences of both kinds. A pair
of the reward model prefers a positive sentence to a negative one. PPO continues the first words. Repeated sentences,
and those without a partner of the other kind, are left out. Works best with chat_template plain.
"""

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field

from data.read.columns import read_choice
from data.read.formats import LocatedRecords
from data.read.paths import TableConfig, open_path
from data.read.records import Phase, Record, Skipped, read_text
from data.read.remote import refuse_failures
from data.read.table import Table
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("cornell-movie-review-data/rotten_tomatoes",)
PHASES: dict[Phase, str] = {"sft": "sft", "reward": "reward", "ppo": "ppo"}


class Config(TableConfig):
    """How sentences become rows."""

    prompt_words: int = Field(4, ge=1)
    """words of a sentence that are the prompt"""


class Reviews(Table):
    remote = False  # the sentences of the hub count in the digest of a run's data, as they did in its first version


@dataclass(frozen=True, slots=True)
class TwoFiles:
    """The original files, one sentence a line, as records of text and label."""

    files: tuple[Path, ...]
    """the positive sentences, the negative ones"""

    def records(self, split: str, config: TableConfig) -> LocatedRecords:
        for file, label in zip(self.files, (1, 0), strict=True):
            for number, line in enumerate(_read_text(file).split("\n"), 1):
                if line.strip():
                    yield f"{file}:{number}", {"text": line, "label": label}

    def fingerprint(self, split: str, config: TableConfig) -> str:
        """split: the phase, which is a part of the digest of old runs"""
        digest = hashlib.sha256(repr((split, config)).encode())
        for file in self.files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()


def build(config: Config, path: str) -> Reviews:
    combine, folder = partial(review_rows, words=config.prompt_words), Path(path).expanduser()
    if path and folder.is_dir():
        files = tuple(_find_file(folder, kind) for kind in ("pos", "neg"))
        return Reviews(TwoFiles(files), config, parse, combine, splits=PHASES)
    return Reviews(open_path(path or HUB_IDS[0]), config, parse, combine)


def _find_file(folder: Path, kind: str) -> Path:
    for file in (folder / f"rt-polarity.{kind}", folder / f"rt-polarity.{kind}.gz"):
        if file.is_file():
            return file
    raise UserError(f"{folder}: no rt-polarity.{kind} or rt-polarity.{kind}.gz there; expected one sentence a line")


def _read_text(path: Path) -> str:
    """The original files are in Latin-1, some copies in UTF-8."""
    with refuse_failures(path, EOFError), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def parse(record: Record, location: str) -> tuple[int, str]:
    """(1 for a positive sentence, else 0; the sentence)."""
    return read_choice(record, "label", location, (0, 1)), detokenize(read_text(record, "text", location))


def review_rows(items: Iterator[tuple[int, str] | Skipped], phase: Phase, words: int) -> Iterator[Row | Skipped]:
    """sft: both sentences of each pair; reward: the pairs, with an empty prompt; ppo: the first words.

    The i-th positive and the i-th negative sentence are a pair. `columns["label"]` of a single sentence is its label.
    """
    sentences: tuple[list[str], list[str]] = ([], [])
    for item in items:
        if isinstance(item, Skipped):
            yield item
        else:
            sentences[item[0]].append(item[1])
    negative, positive = (list(dict.fromkeys(texts)) for texts in sentences)
    yield from [Skipped("repeated sentence")] * (sum(map(len, sentences)) - len(positive) - len(negative))
    yield from [Skipped("no sentence of the other kind left for it")] * abs(len(positive) - len(negative))
    pairs = list(zip(positive, negative, strict=False))
    for pair, group in zip(pairs, _groups(pairs, words), strict=True):
        if phase == "reward":
            yield Row((), *pair, group)
            continue
        for label, sentence in zip((1, 0), pair, strict=True):
            prompt = _first_words(sentence, words)
            response = sentence.removeprefix(prompt) if phase == "sft" else None
            yield Row((Message("user", prompt),), response, None, group, {"label": label})


def _groups(pairs: list[tuple[str, str]], words: int) -> list[str]:
    """The group of each pair. Pairs that share a prompt, directly or through other pairs, have one group."""
    parent: dict[str, str] = {}

    def root(prompt: str) -> str:
        while parent.setdefault(prompt, prompt) != prompt:
            prompt = parent[prompt]
        return prompt

    for pair in pairs:
        low, high = sorted(root(_first_words(sentence, words)) for sentence in pair)
        parent[high] = low
    return [root(_first_words(positive, words)) for positive, _ in pairs]


def _first_words(sentence: str, count: int) -> str:
    return " ".join(sentence.split(" ")[:count])


def detokenize(sentence: str) -> str:
    """Ordinary English from a sentence with spaces around its punctuation.

    Spaces between a word and its punctuation are removed, and ' . . . ' becomes '... '. Double quotes open and close in
    turn; spaces inside them are removed. Case is unchanged (the files are in lower case).
    """
    sentence = re.sub(r"\.(?: \.)+", lambda dots: dots[0].replace(" ", ""), " ".join(sentence.split()))
    sentence = re.sub(r" (?=[.,;:!?%)\]])| (?='(?:s|t|d|m|re|ve|ll)\b)| (?=n't\b)|(?<=[(\[]) ", "", sentence)
    quotes = iter(range(sentence.count('"')))
    return re.sub(r' ?" ?', lambda mark: _quote(mark[0], next(quotes) % 2), sentence).strip()


def _quote(mark: str, closing: int) -> str:
    return mark.lstrip(" ") if closing else mark.rstrip(" ")
