"""Film-review sentences, positive and negative (Pang and Lee 2005): continue a sentence, and do it kindly.

`place` is a directory with rt-polarity.pos and rt-polarity.neg (.gz too), or a hub id or file with the columns text and
label, such as cornell-movie-review-data/rotten_tomatoes. Fine-tuning learns to continue sentences of both kinds; a
reward pair is a positive sentence over a negative one; PPO continues the first words. Repeated sentences, and those
that the other kind has no partner for, are left out. Best with chat_template plain.
"""

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from data.read.columns import one_of
from data.read.places import TableConfig, open_place
from data.read.records import Phase, Skipped, text
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
    place: str

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
        """What changes whenever the rows do."""
        if not _is_original(self.place):
            return open_place(self.place).fingerprint(self.config.split or "train", self.config)
        digest = hashlib.sha256(repr((phase, self.config)).encode())
        for side in ("pos", "neg"):
            digest.update(hashlib.sha256(_file(self.place, side).read_bytes()).digest())
        return digest.hexdigest()

    def _pairs(self) -> tuple[list[tuple[str, str]], list[Skipped]]:
        """(the i-th positive and the i-th negative sentence, what is left out)."""
        read = _from_files if _is_original(self.place) else _from_table
        sides = read(self.place, self.config)
        skipped = [one for side in sides for one in side if isinstance(one, Skipped)]
        every = [[detokenize(one) for one in side if isinstance(one, str)] for side in sides]
        positive, negative = (list(dict.fromkeys(side)) for side in every)
        skipped += [Skipped("repeated sentence")] * (sum(map(len, every)) - len(positive) - len(negative))
        skipped += [Skipped("no sentence of the other kind left for it")] * abs(len(positive) - len(negative))
        return list(zip(positive, negative, strict=False)), skipped

    def _groups(self, pairs: list[tuple[str, str]]) -> list[str]:
        """One name per pair; pairs that share a prompt, however indirectly, share a name and so a split."""
        parent: dict[str, str] = {}

        def root(prompt: str) -> str:
            while parent.setdefault(prompt, prompt) != prompt:
                prompt = parent[prompt]
            return prompt

        first = [(self._cut(positive)[0], self._cut(negative)[0]) for positive, negative in pairs]
        for one, other in first:
            low, high = sorted((root(one), root(other)))
            parent[high] = low
        return [root(one) for one, _ in first]

    def _cut(self, sentence: str) -> tuple[str, str]:
        """(the first words, the rest with the space before it)."""
        words = " ".join(sentence.split(" ")[: self.config.prompt_words])
        return words, sentence.removeprefix(words)


def build(config: Config, place: str) -> Reviews:
    if not place:
        raise UserError("rt_polarity: got no place, expected rt_polarity:DIRECTORY or rt_polarity:HUB_ID")
    if _is_original(place):
        _file(place, "pos"), _file(place, "neg")
    else:
        open_place(place)
    return Reviews(config, place)


def _is_original(place: str) -> bool:
    """Whether the place is the directory of two files, and not a table."""
    return Path(place).expanduser().is_dir()


def _file(place: str, side: str) -> Path:
    for name in (f"rt-polarity.{side}", f"rt-polarity.{side}.gz"):
        if (Path(place).expanduser() / name).is_file():
            return Path(place).expanduser() / name
    raise UserError(f"{place}: no rt-polarity.{side} or rt-polarity.{side}.gz there; expected one sentence a line")


def _from_files(place: str, config: Config) -> tuple[Sentences, Sentences]:
    positive, negative = (_sentences(_file(place, side)) for side in ("pos", "neg"))
    return positive, negative


def _sentences(path: Path) -> Sentences:
    """The lines that are not blank. The original files are Latin-1, some copies UTF-8."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from None
    try:
        whole = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        whole = data.decode("latin-1")
    lines: Sentences = [line.strip() for line in whole.split("\n") if line.strip()]
    if not lines:
        raise UserError(f"{path}: 0 sentences; expected one a line")
    return lines


def _from_table(place: str, config: Config) -> tuple[Sentences, Sentences]:
    sides: tuple[Sentences, Sentences] = ([], [])
    for where, record in open_place(place).records(config.split or "train", config):
        if isinstance(record, Skipped):
            sides[0].append(record)
            continue
        try:
            positive = one_of(record, "label", where, (0, 1))
            sides[0 if positive else 1].append(text(record, "text", where))
        except UserError as mistake:
            sides[0].append(Skipped(str(mistake), bad=True))
    return sides


def detokenize(sentence: str) -> str:
    """Ordinary English from a sentence with spaces around its punctuation.

    Marks close up to the word they belong to, ' . . . ' becomes '... ', and double quotes hug what they enclose, the
    odd ones opening and the even ones closing. Case is left as it is (the files are in lower case).
    """
    sentence = re.sub(r"\.(?: \.)+", lambda dots: dots[0].replace(" ", ""), " ".join(sentence.split()))
    sentence = re.sub(r" (?=[.,;:!?%)\]])| (?='(?:s|t|d|m|re|ve|ll)\b)| (?=n't\b)|(?<=[(\[]) ", "", sentence)
    quotes = iter(range(sentence.count('"')))
    return re.sub(r' ?" ?', lambda mark: _quote(mark[0], next(quotes) % 2), sentence).strip()


def _quote(mark: str, closing: int) -> str:
    return mark.lstrip(" ") if closing else mark.rstrip(" ")
