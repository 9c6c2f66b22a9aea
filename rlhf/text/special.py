"""Special tokens in rendered text: those that the template wrote, apart from those that a message spells."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

from rlhf.text.templates import THOUGHT_TAG

T = TypeVar("T")

PRIVATE = 0x100000
"""the first of the characters that stand for special tokens while a template renders"""


class SpecialTokens:
    """The special tokens of a tokenizer. ids: by their text"""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        self._starts = frozenset(token[0] for token in ids)  # a text without them spells no token (a quick test)
        # Templates read the tags of thoughts, so those stay.
        texts = [token for token in ids if THOUGHT_TAG not in token]
        self._masks = {text: chr(PRIVATE + i) for i, text in enumerate([*texts, *(self._starts - {*texts})])}

    def spelled_in(self, text: str) -> bool:
        """Whether a text contains the text of a special token."""
        return any(start in text for start in self._starts) and any(token in text for token in self.ids)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches a special token, the longest one, as its only group."""
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {ord(mask): token for token, mask in self._masks.items()}

    def hide(self, value: T) -> T:
        """`value` with a private character for each special token that a text in it spells."""
        hidden: T = self._hidden(value)
        return hidden

    def _hidden(self, value: object) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(lambda match: self._masks.get(match[0], match[0]), value)
        if isinstance(value, dict):
            return {key: self._hidden(item) for key, item in value.items()}
        return [self._hidden(item) for item in value] if isinstance(value, list) else value

    def hide_ends(self, text: str) -> str:
        """A text that does not become a special token together with what a template writes after it."""
        sizes = range(1, min(len(text), max(map(len, self.ids), default=0)) + 1)
        start = next((len(text) - n for n in reversed(sizes) if any(t.startswith(text[-n:]) for t in self.ids)), None)
        return text if start is None else text[:start] + self._masks[text[start]] + text[start + 1 :]

    def show(self, text: str) -> str:
        """A rendered text with the special tokens that `hide` hid."""
        return text.translate(self._tokens)

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """A rendered text as (text, whether it is a special token that the template wrote)."""
        for number, part in enumerate(self.pattern.split(text)):  # text, token, text, ..., text
            if part:
                yield (part, True) if number % 2 else (self.show(part), False)
