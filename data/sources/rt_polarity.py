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
from pathlib import Path

from pydantic import Field

from data.read.columns import read_choice
from data.read.paths import TableConfig, open_path
from data.read.records import Phase, Skipped, read_text
from data.read.remote import refuse_failures
from rlhf.errors import UserError
from rlhf.types import Message, Row

HUB_IDS = ("cornell-movie-review-data/rotten_tomatoes",)
Sentences = list[str | Skipped]


class Config(TableConfig):
    """How sentences become rows."""

    prompt_words: int = Field(4, ge=1)
    """words of a sentence that are the prompt"""


@dataclass(frozen=True, slots=True)
class Reviews:
    config: Config
    path: str

    def rows(self, phase: Phase) -> Iterator[Row | Skipped]:
        """sft: both sentences of each pair; reward: the pairs, with an empty prompt; ppo: the first words.

        `columns["label"]` of a single sentence is 1 if it is positive, else 0.
        """
        pairs, skipped = self._pairs()
        yield from skipped
        for (positive, negative), group in zip(pairs, self._groups(pairs), strict=True):
            if phase == "reward":
                yield Row((), positive, negative, group)
                continue
            for label, sentence in ((1, positive), (0, negative)):
                prompt, response = self._cut(sentence)
                yield Row(
                    (Message("user", prompt),), response if phase == "sft" else None, None, group, {"label": label}
                )

    def fingerprint(self, phase: Phase) -> str:
        """A text that changes whenever the rows change."""
        if not _is_directory(self.path):
            return open_path(self.path).fingerprint(self.config.split or "train", self.config)
        digest = hashlib.sha256(repr((phase, self.config)).encode())
        for side in ("pos", "neg"):
            digest.update(hashlib.sha256(_find_file(self.path, side).read_bytes()).digest())
        return digest.hexdigest()

    def _pairs(self) -> tuple[list[tuple[str, str]], list[Skipped]]:
        """(pairs of the i-th positive and the i-th negative sentence, sentences that are left out)."""
        is_directory = _is_directory(self.path)
        sides = _read_files(self.path) if is_directory else _read_table(self.path, self.config)
        skipped = [sentence for side in sides for sentence in side if isinstance(sentence, Skipped)]
        detokenized = [[detokenize(sentence) for sentence in side if isinstance(sentence, str)] for side in sides]
        positive, negative = (list(dict.fromkeys(side)) for side in detokenized)
        skipped += [Skipped("repeated sentence")] * (sum(map(len, detokenized)) - len(positive) - len(negative))
        skipped += [Skipped("no sentence of the other kind left for it")] * abs(len(positive) - len(negative))
        return list(zip(positive, negative, strict=False)), skipped

    def _groups(self, pairs: list[tuple[str, str]]) -> list[str]:
        """The group of each pair. Pairs that share a prompt, directly or through other pairs, have one group."""
        parent: dict[str, str] = {}

        def root(prompt: str) -> str:
            while parent.setdefault(prompt, prompt) != prompt:
                prompt = parent[prompt]
            return prompt

        first = [(self._cut(positive)[0], self._cut(negative)[0]) for positive, negative in pairs]
        for positive, negative in first:
            low, high = sorted((root(positive), root(negative)))
            parent[high] = low
        return [root(positive) for positive, _ in first]

    def _cut(self, sentence: str) -> tuple[str, str]:
        """(the first words, the rest with the space before it)."""
        words = " ".join(sentence.split(" ")[: self.config.prompt_words])
        return words, sentence.removeprefix(words)


def build(config: Config, path: str) -> Reviews:
    if not path:
        raise UserError("rt_polarity: got no path, expected rt_polarity:DIRECTORY or rt_polarity:HUB_ID")
    if _is_directory(path):
        _find_file(path, "pos"), _find_file(path, "neg")
    else:
        open_path(path)
    return Reviews(config, path)


def _is_directory(path: str) -> bool:
    """Whether the path is a directory with the two original files, and not a table."""
    return Path(path).expanduser().is_dir()


def _find_file(path: str, side: str) -> Path:
    for name in (f"rt-polarity.{side}", f"rt-polarity.{side}.gz"):
        if (Path(path).expanduser() / name).is_file():
            return Path(path).expanduser() / name
    raise UserError(f"{path}: no rt-polarity.{side} or rt-polarity.{side}.gz there; expected one sentence a line")


def _read_files(path: str) -> list[Sentences]:
    return [_read_sentences(_find_file(path, side)) for side in ("pos", "neg")]


def _read_sentences(path: Path) -> Sentences:
    """The lines that are not blank. The original files are in Latin-1, some copies in UTF-8."""
    with refuse_failures(path, EOFError), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    lines: Sentences = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise UserError(f"{path}: 0 sentences; expected one a line")
    return lines


def _read_table(path: str, config: Config) -> list[Sentences]:
    sides: list[Sentences] = [[], []]
    for location, record in open_path(path).records(config.split or "train", config):
        if isinstance(record, Skipped):
            sides[0].append(record)
            continue
        try:
            positive = read_choice(record, "label", location, (0, 1))
            sides[0 if positive else 1].append(read_text(record, "text", location))
        except UserError as error:
            sides[0].append(Skipped(str(error), bad=True))
    return sides


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
