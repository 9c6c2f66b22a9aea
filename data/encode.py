"""Rows become ids of a bounded length, or a reason why not. One encoder for each phase; no tensors yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from data.config import DataOptions
from data.reading import Phase, Unusable
from rlhf.text import Template
from rlhf.types import Message, Row

LossOn = Literal["last", "every", "all"]
Spans = tuple[tuple[int, int], ...]
Ids = list[int]


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


Item = Demonstration | Preference | Prompt
Encoded = tuple[Item, bool] | str
"""An item and whether it was cut to length, or the reason it was dropped."""


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
            yield "not plain text" if row.prompt else (Demonstration(whole, ((1, len(whole)),)), False)

    def _demonstrations(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        responses = self._responses(rows, [row.response or "" for row in rows])
        for row, prompt, response in zip(rows, self._prompt_ids(rows), responses, strict=True):
            try:
                (kept, turns), (answer,), cut = self._fit(row, prompt, response)
            except Unusable as reason:
                yield str(reason)
                continue
            ids = (*kept, *answer)
            yield Demonstration(ids, self._spans(kept, turns, len(ids))), cut

    def _spans(self, prompt: Ids, turns: Sequence[Message], size: int) -> Spans:
        if self.loss_on == "all":
            return ((1, size),)
        if self.loss_on == "last" or not any(message.role == "assistant" for message in turns):
            return ((len(prompt), size),)
        _, flags = self.template.prompt_ids_and_turns(turns)
        learned = flags[-len(prompt) :] + [True] * (size - len(prompt))
        return _runs([False, *learned[1:]])

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
        (kept, _), (chosen, rejected), cut = self._fit(row, prompt, one, other)
        if chosen == rejected:
            raise Unusable("equal sides after truncation")
        margin = row.columns.get("margin")
        margin = float(margin) if isinstance(margin, int | float) else None
        return Preference((*kept, *chosen), (*kept, *rejected), len(kept), margin), cut

    def _prompts(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        for row, ids in zip(rows, self._prompt_ids(rows), strict=True):
            try:
                kept, _turns = self._fit_prompt(row, ids, self.options.max_prompt_length)
            except Unusable as reason:
                yield str(reason)
            else:
                yield Prompt(tuple(kept), row), len(kept) < len(ids)

    def _prompt_ids(self, rows: Sequence[Row]) -> list[Ids]:
        return self.template.prompt_ids_many([row.prompt for row in rows])

    def _responses(self, rows: Sequence[Row], texts: Sequence[str]) -> list[Ids]:
        opening = [not any(message.content for message in row.prompt) for row in rows]
        return self.template.response_ids_many(texts, opening)

    def _fit(self, row: Row, prompt: Ids, *responses: Ids) -> tuple["Fitted", list[Ids], bool]:
        """The prompt and the responses cut to max_length together: (prompt, responses, whether anything was cut).

        The prompt gives way first, to the longest response. A response gives way only where tokens may go and it does
        not fit beside a single prompt token; it then has no EOS, for it does not end there.
        """
        room = self.options.max_length - max(map(len, responses))
        if room < 1 and self.options.truncate == "turns":
            raise Unusable("response too long")
        fitted = self._fit_prompt(row, prompt, max(1, min(room, self.options.max_prompt_length)))
        kept = [response[: self.options.max_length - len(fitted[0])] for response in responses]
        return fitted, kept, len(fitted[0]) < len(prompt) or kept != list(responses)

    def _fit_prompt(self, row: Row, ids: Ids, limit: int) -> "Fitted":
        if len(ids) <= limit:
            return ids, row.prompt
        return fit_prompt(self.template, row.prompt, limit, by_tokens=self.options.truncate == "tokens")


Fitted = tuple[Ids, Sequence[Message]]
"""The ids of a prompt, and the turns that are left of it."""


def fit_prompt(template: Template, messages: Sequence[Message], limit: int, by_tokens: bool) -> Fitted:
    """A prompt in at most `limit` tokens.

    Whole oldest turns go first, a leading system message staying; what is left begins with a user's turn. If that is
    not enough and `by_tokens`, tokens go from the left, a leading BOS (or the EOS that stands for it) staying.
    Raises: Unusable if it does not fit.
    """
    for kept in _shorter(messages):
        ids = template.prompt_ids(kept)
        if len(ids) <= limit:
            return ids, kept
    if not by_tokens:
        raise Unusable("prompt too long")
    tokenizer = template.tokenizer
    head = 1 if ids[0] in (tokenizer.bos_token_id, tokenizer.eos_token_id) else 0
    return ids[:head] + ids[head + len(ids) - limit :], kept


def _shorter(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, and then without their oldest turns, ever fewer."""
    yield messages
    system = [message for message in messages[:1] if message.role == "system"]
    for start, message in enumerate(messages):
        if message.role == "user" and start > len(system):
            yield [*system, *messages[start:]]


def _runs(flags: Sequence[bool]) -> Spans:
    """The stretches of True."""
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
