"""A tokenizer's text and ids, many texts at a time: all that is known of how tokenizers of different kinds behave."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.hub.untrusted import fails_as_user_error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Id by text of what the tokenizer never makes of ordinary text, unless the text spells it out."""
    named = set(tokenizer.all_special_tokens)  # slow tokenizers do not mark all of them
    added = sorted(tokenizer.added_tokens_decoder.items())
    return {str(token): i for i, token in added if token.special or str(token) in named}


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id. `len(tokenizer)` counts tokens, and ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def make_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Make an added token the tokenizer's EOS, and a special one, without changing what else it does."""
    if text == tokenizer.eos_token:
        return
    now = next(token for token in tokenizer.added_tokens_decoder.values() if str(token) == text)
    ways = {name: getattr(now, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    eos = AddedToken(text, special=True, **ways)
    tokenizer.add_special_tokens({"eos_token": eos}, replace_extra_special_tokens=False)


@dataclass(frozen=True)
class Encoder:
    """Text to ids and back. No BOS is ever added; with `split`, a special token in a text is ordinary text."""

    tokenizer: PreTrainedTokenizerBase

    def encode_many(self, texts: Sequence[str], split: bool) -> list[list[int]]:
        """The ids of each text as it stands."""
        if not self.tokenizer.is_fast:
            options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": split, "verbose": False}
            return [list(self.tokenizer.encode(text, **options)) if text else [] for text in texts]
        with self._backend(split) as backend:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids if text else [] for text, encoding in zip(texts, encodings, strict=True)]

    def encode(self, text: str) -> list[int]:
        """The ids of one text, special tokens in it being ordinary text."""
        return self.encode_many([text], split=True)[0]

    def encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, split, as they are in the middle of a longer text."""
        if not self.marks_start:
            return self.encode_many(texts, split=True)
        size = len(self.anchor)
        encoded = self.encode_many(["\n" + text for text in texts], split=True)
        return [
            ids[size:] if ids[:size] == self.anchor else self.encode(text)
            for ids, text in zip(encoded, texts, strict=True)
        ]

    def encode_with_spans(self, text: str, split: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and the characters [start, end) each of them stands for.

        Raises: UserError for a slow tokenizer, which does not know.
        """
        if not self.tokenizer.is_fast:
            raise UserError(
                "the loss on earlier turns needs a fast tokenizer, which knows where in a text its tokens stand; "
                "add a tokenizer.json to the model, or take the loss on the last response only"
            )
        with self._backend(split) as backend:
            encoding = backend.encode(text, add_special_tokens=False)
        return (encoding.ids, encoding.offsets) if text else ([], [])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def decode_inside(self, ids: Sequence[int]) -> str:
        """The text of ids that stood in the middle of a longer text: a space at its start is kept."""
        before = self.anchor if self.marks_start else []
        return self.decode([*before, *ids]).removeprefix(self.decode(before))

    @cached_property
    def anchor(self) -> list[int]:
        """The ids of a line break at the start of a text."""
        return self.encode("\n")

    @cached_property
    def marks_start(self) -> bool:
        """Whether the tokenizer opens every text with a space mark, as those of the Llama 2 family do."""
        size = len(self.anchor)
        inside = self.encode("\na")
        return inside[:size] == self.anchor and inside[size:] != self.encode("a")

    @contextlib.contextmanager
    def _backend(self, split: bool) -> Iterator[Any]:
        """The tokenizer's Rust half for one use: nothing is cut, padded or added, and spans keep their white space."""
        backend: Any = self.tokenizer.backend_tokenizer
        before, after = backend.encode_special_tokens, backend.post_processor
        cut, padded = backend.truncation, backend.padding
        backend.encode_special_tokens, backend.post_processor = split, None
        backend.no_truncation()
        backend.no_padding()
        try:
            with fails_as_user_error("the tokenizer"):
                yield backend
        finally:
            backend.encode_special_tokens, backend.post_processor = before, after
            if cut is not None:
                backend.enable_truncation(**cut)
            if padded is not None:
                backend.enable_padding(**padded)
