"""Generated rows that cost a tokenizer as much work as natural text, and a tokenizer trained on such rows.

Words consist of syllables. Their frequencies follow Zipf's law in Mandelbrot's form, p ~ 1 / (rank + 4) ** 1.2, and
resemble those of HH dialogues (in brackets): the 100 most frequent words are 0.55 (0.52) of a text, 1,000 are 0.78
(0.78), 3,000 are 0.86 (0.89). A byte-level BPE of 32k tokens has most words as one token and splits the others.
"""

import functools
import json
import math
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WORDS = 60_000
AT_ONCE = 5_000
PROMPT_SHARE = 0.4
"""of a row's words"""
SENTENCE = 12
"""words, on average"""
EOS = "<|end|>"


@functools.cache
def words() -> tuple[str, ...]:
    """Distinct words, the most frequent first; frequent ones are shorter."""
    random = Random(0)
    onsets = [*"bcdfghlmnprstvw", "st", "tr", "ch", "sh", "pl", "gr", "br", *[""] * 6]
    vowels = [*"aeiouy", "ea", "ou"]
    codas = [*"nrstlmd", "ck", "ng", "st", *[""] * 12]
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < WORDS:
        rare = 0.07 * math.log10(1 + len(vocabulary) / 10)
        syllables = 1 + sum(random.random() < rare for _ in range(5))
        parts = [f"{random.choice(onsets)}{random.choice(vowels)}{random.choice(codas)}" for _ in range(syllables)]
        vocabulary.setdefault("".join(parts))
    return tuple(vocabulary)


class Writer:
    """Draws texts word by word."""

    def __init__(self, seed: int) -> None:
        self._random, vocabulary = np.random.default_rng(seed), words()
        ranks = np.arange(len(vocabulary))
        self._edges = np.cumsum(1 / (ranks + 5) ** 1.2)
        forms = [*vocabulary, *(f"{word}," for word in vocabulary), *(f"{word}." for word in vocabulary)]
        self._forms = np.array(forms, dtype=object)

    def texts(self, sizes: np.ndarray) -> list[str]:
        """One text of each number of words."""
        word_numbers = np.searchsorted(self._edges, self._random.random(sizes.sum()) * self._edges[-1])
        point = self._random.random(len(word_numbers))
        word_numbers = word_numbers + len(self._edges) * ((point < 2 / SENTENCE).astype(int) + (point < 1 / SENTENCE))
        words, ends = self._forms[word_numbers].tolist(), np.cumsum(sizes).tolist()
        return [" ".join(words[start:end]).capitalize() for start, end in zip([0, *ends], ends, strict=False)]


def write_rows(file: Path, rows: int, words_in_row: float, seed: int = 1) -> None:
    """JSON lines with the columns prompt and response; the number of words varies by a tenth."""
    writer, random = Writer(seed), np.random.default_rng(seed)
    with file.open("w", encoding="utf-8") as out:
        for start in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - start)
            sizes = np.maximum(2, random.normal(words_in_row, words_in_row / 10, count).round().astype(int))
            prompts = np.maximum(1, (sizes * PROMPT_SHARE).astype(int))
            pairs = zip(writer.texts(prompts), writer.texts(sizes - prompts), strict=True)
            out.writelines(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs)


def train_tokenizer(folder: Path, vocabulary: int) -> None:
    """Byte-level BPE with one special token, saved into `folder`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(Writer(2).texts(np.full(20_000, 95)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(folder)


def words_for(tokenizer: PreTrainedTokenizerBase, tokens: float, prompt_tokens: int) -> float:
    """The number of words in a row of `tokens` tokens, of which the template writes `prompt_tokens`."""
    texts = Writer(3).texts(np.full(500, 100))
    each = sum(map(len, tokenizer(texts)["input_ids"])) / (500 * 100)
    return (tokens - prompt_tokens) / each
