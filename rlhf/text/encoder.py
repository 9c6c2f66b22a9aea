"""Batches of texts to ids and back: the only module that handles the differences between kinds of tokenizers."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from rlhf.errors import UserError

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of special tokens by their text. Ordinary text never gives these ids, unless it contains that text."""
    named = set(tokenizer.all_special_tokens)  # slow tokenizers do not mark all of them
    added = sorted(tokenizer.added_tokens_decoder.items())
    return {str(token): i for i, token in added if token.special or str(token) in named}


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id. `len(tokenizer)` is the number of tokens, and ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def make_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Make an added token the tokenizer's EOS and a special token; its other flags do not change."""
    if text == tokenizer.eos_token:
        return
    token = next(added for added in tokenizer.added_tokens_decoder.values() if str(added) == text)
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    eos = AddedToken(text, special=True, **flags)
    tokenizer.add_special_tokens({"eos_token": eos}, replace_extra_special_tokens=False)


@dataclass(frozen=True)
class Encoder:
    """Text to ids and back. BOS is never added. With `split`, the text of a special token is ordinary text."""

    tokenizer: PreTrainedTokenizerBase

    def encode_many(self, texts: Sequence[str], split: bool) -> list[list[int]]:
        """The ids of each text, unchanged."""
        if not self.tokenizer.is_fast:
            options: dict[str, bool] = {"add_special_tokens": False, "split_special_tokens": split, "verbose": False}
            return [list(self.tokenizer.encode(text, **options)) if text else [] for text in texts]
        with self._backend(split) as backend:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids if text else [] for text, encoding in zip(texts, encodings, strict=True)]

    def encode(self, text: str) -> list[int]:
        """The ids of one text; the text of a special token is ordinary text."""
        return self.encode_many([text], split=True)[0]

    def encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text as in the middle of a longer text; the text of a special token is ordinary text."""
        if not self.prefixes_space:
            return self.encode_many(texts, split=True)
        size = len(self.line_break_ids)
        encoded = self.encode_many(["\n" + text for text in texts], split=True)
        return [
            ids[size:] if ids[:size] == self.line_break_ids else self.encode(text)
            for ids, text in zip(encoded, texts, strict=True)
        ]

    def encode_with_spans(self, text: str, split: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids of a text, [start, end) of each id's characters in it).

        Raises: UserError for a slow tokenizer, which has no character offsets.
        """
        if not self.tokenizer.is_fast:
            raise UserError(
                "the loss on earlier turns needs a fast tokenizer, which gives the position of each token in a text; "
                "add a tokenizer.json to the model, or train on the last response only"
            )
        with self._backend(split) as backend:
            encoding = backend.encode(text, add_special_tokens=False)
        return (encoding.ids, encoding.offsets) if text else ([], [])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def decode_inside(self, ids: Sequence[int]) -> str:
        """The text of ids from the middle of a longer text; a space at its start stays."""
        context = self.line_break_ids if self.prefixes_space else []
        return self.decode([*context, *ids]).removeprefix(self.decode(context))

    def ends_in_a_byte(self, ids: Sequence[int]) -> bool:
        """Whether the last id is a byte such as <0xE4>, with which the Llama 2 family spells what has no token."""
        last = next((i for i in reversed(ids) if i not in self._special_ids), None)  # decoding leaves those out
        return last is not None and BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(last))) is not None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(special_tokens(self.tokenizer).values())

    @cached_property
    def line_break_ids(self) -> list[int]:
        """The ids of a line break at the start of a text."""
        return self.encode("\n")

    @cached_property
    def prefixes_space(self) -> bool:
        """Whether the tokenizer puts a space before every text, as those of the Llama 2 family do."""
        size = len(self.line_break_ids)
        inside = self.encode("\na")
        return inside[:size] == self.line_break_ids and inside[size:] != self.encode("a")

    @contextlib.contextmanager
    def _backend(self, split: bool) -> Iterator[Any]:
        """The tokenizer's Rust part without truncation, padding and post-processing; restored after the block."""
        backend: Any = self.tokenizer.backend_tokenizer
        encode_special_tokens, post_processor = backend.encode_special_tokens, backend.post_processor
        truncation, padding = backend.truncation, backend.padding
        backend.encode_special_tokens, backend.post_processor = split, None
        backend.no_truncation()
        backend.no_padding()
        try:
            yield backend
        finally:
            backend.encode_special_tokens, backend.post_processor = encode_special_tokens, post_processor
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)
