"""Rows become ids of a bounded length, or a reason why not. One encoder for each phase; no tensors yet."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from data.build.cut import LEAST, Cut, Fitted, Ids, fit_prompt
from data.config import DataOptions
from data.read.records import Phase, Unusable
from rlhf.text.tokenizer import Template
from rlhf.types import Row

LossOn = Literal["last", "every", "all"]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the response to learn from."""

    ids: tuple[int, ...]
    """prompt and response"""
    spans: Spans
    """stretches [start, end) of the ids that are learned, in order; none begins at 0"""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt; both sides begin with the same prompt tokens."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    prompt_length: int
    """tokens of the prompt, at least 1"""
    margin: float | None = None
    """how much better the chosen side is, from the row's column `margin`"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to respond to."""

    ids: tuple[int, ...]
    row: Row
    """its prompt as it was cut"""


Item = Demonstration | Preference | Prompt
Encoded = tuple[Item, Cut] | str
"""An item and what of it was cut to length, or the reason it was dropped."""


@dataclass(frozen=True)
class RowEncoder:
    """From rows to items, many at a time: tokenizers are twice as fast that way."""

    phase: Phase
    template: Template
    options: DataOptions
    loss_on: LossOn = "last"
    plain_text: bool = False
    """rows are texts to learn whole, of any length, without a template"""

    def __call__(self, rows: Sequence[Row]) -> list[Encoded]:
        """One result a row, in order."""
        encode = {"sft": self._demonstrations, "reward": self._preferences, "ppo": self._prompts}[self.phase]
        return list(self._texts(rows) if self.plain_text else encode(rows))

    def _texts(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        tokenizer = self.template.tokenizer
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        texts = self.template.encode_many([row.response or "" for row in rows], split=True)
        for row, ids in zip(rows, texts, strict=True):
            whole = (*start, *ids, tokenizer.eos_token_id)
            yield "not plain text" if row.prompt else (Demonstration(whole, ((1, len(whole)),)), Cut())

    def _demonstrations(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        responses = self._responses(rows, [row.response or "" for row in rows])
        for row, prompt, response in zip(rows, self._prompt_ids(rows), responses, strict=True):
            try:
                kept, (answer,), cut = self._fit(row, prompt, response)
            except Unusable as reason:
                yield str(reason)
                continue
            ids = (*kept.ids, *answer)
            yield Demonstration(ids, self._spans(kept, len(ids))), cut

    def _spans(self, prompt: Fitted, size: int) -> Spans:
        if self.loss_on == "all":
            return ((1, size),)
        start = len(prompt.ids)
        if self.loss_on == "last" or not any(message.role == "assistant" for message in prompt.messages):
            return ((start, size),)
        _, flags = self.template.prompt_ids_and_turns(prompt.messages)
        return _runs([False, *flags[1:], *[True] * (size - start)])

    def _preferences(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        sides = [self._responses(rows, [row.response or "" for row in rows])]
        sides.append(self._responses(rows, [row.rejected or "" for row in rows]))
        for row, prompt, one, other in zip(rows, self._prompt_ids(rows), *sides, strict=True):
            try:
                yield self._preference(row, prompt, one, other)
            except Unusable as reason:
                yield str(reason)

    def _preference(self, row: Row, prompt: Ids, one: Ids, other: Ids) -> Encoded:
        if one == other:
            raise Unusable("equal sides")
        kept, (chosen, rejected), cut = self._fit(row, prompt, one, other)
        if chosen == rejected:
            raise Unusable("equal sides after truncation")
        margin = row.columns.get("margin")
        margin = float(margin) if isinstance(margin, int | float) else None
        return Preference((*kept.ids, *chosen), (*kept.ids, *rejected), len(kept.ids), margin), cut

    def _prompts(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        for row, ids in zip(rows, self._prompt_ids(rows), strict=True):
            try:
                kept = self._fit_prompt(row, ids, self.options.max_prompt_length)
            except Unusable as reason:
                yield str(reason)
                continue
            cut = kept.messages is not row.prompt
            yield Prompt(tuple(kept.ids), replace(row, prompt=tuple(kept.messages)) if cut else row), Cut(prompt=cut)

    def _prompt_ids(self, rows: Sequence[Row]) -> list[Ids]:
        return self.template.prompt_ids_many([row.prompt for row in rows])

    def _responses(self, rows: Sequence[Row], texts: Sequence[str]) -> list[Ids]:
        opening = [not any(message.content for message in row.prompt) for row in rows]
        return self.template.response_ids_many(texts, opening)

    def _fit(self, row: Row, prompt: Ids, *responses: Ids) -> tuple[Fitted, list[Ids], Cut]:
        """The prompt and the responses cut to max_length together: (prompt, responses, what was cut).

        The prompt gives way first, to the longest response, but for its least share. Then a response does, where tokens
        may go; it has no EOS, for it does not end there.
        """
        length = self.options.max_length
        room = length - max(map(len, responses))
        if self.options.truncate == "tokens":
            room = min(max(room, self._least_prompt), length - 1)
        elif room < 1:
            raise Unusable("response too long")
        fitted = self._fit_prompt(row, prompt, min(room, self.options.max_prompt_length))
        kept = [response[: length - len(fitted.ids)] for response in responses]
        return fitted, kept, Cut(fitted.messages is not row.prompt, kept != list(responses))

    @cached_property
    def _least_prompt(self) -> int:
        """Tokens that a prompt keeps before a response gives way: what the template writes, and its share of words."""
        return len(self.template.prompt_ids(())) + math.ceil(LEAST * self.options.max_length)

    def _fit_prompt(self, row: Row, ids: Ids, limit: int) -> Fitted:
        if len(ids) <= limit:
            return Fitted(ids, row.prompt)
        return fit_prompt(self.template, row.prompt, limit, by_tokens=self.options.truncate == "tokens")


def _runs(flags: Sequence[bool]) -> Spans:
    """The stretches of True."""
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
