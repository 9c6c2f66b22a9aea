"""Truncation of rows whose prompt and responses are too long together.

Removed first are whole turns, the oldest ones. With `truncate tokens`, further cuts follow: the first words of the last
user turn, the end of a response, and the system message. The text that the template adds around turns stays. So a
prompt is always one that the template renders, and it always has words of the user.
"""

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate

from rlhf.text.dialogues import Template
from rlhf.types import Message, Row

MIN_PROMPT_SHARE = 0.25
"""The words of the last user turn keep this share of `max_length` before a response is cut, and this share of the
prompt's limit before the system message is removed. A fourth of 512 (the default) holds all last turns of HH, 96 % of
those of OASST, and 82 % in pairs with long instructions. The response then has three times as much."""
WORD = re.compile(r"\s*\S{1,16}")
"""A prompt is cut before a match: a word, or 16 characters of a text without spaces."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that fits into its limit."""

    ids: Ids
    messages: Sequence[Message]
    """the prompt after truncation"""

    @property
    def digest(self) -> int:
        """A 64-bit digest of the ids."""
        return int.from_bytes(blake2b(array("I", self.ids).tobytes(), digest_size=8).digest(), signed=True)


def min_prompt_length(template: Template, length: int) -> int:
    """Tokens that a prompt keeps before a response is cut, of `length` for both: those of the template, and
    MIN_PROMPT_SHARE."""
    return len(template.prompt_ids(())) + math.ceil(MIN_PROMPT_SHARE * length)


def fit_sequence(template: Template, row: Row, response: Ids, length: int) -> Ids | None:
    """A prompt and a response in at most `length` tokens; None if the prompt does not fit.

    The prompt is cut first, to make room for the response, but not below its minimal length; then the response loses
    its end, and with it EOS.
    """
    room = min(max(length - len(response), min_prompt_length(template, length)), length - 1)
    prompt = fit_prompt(template, row, room, by_tokens=True)
    return None if prompt is None else [*prompt.ids, *response][:length]


def fit_prompt(template: Template, row: Row, limit: int, by_tokens: bool) -> FittedPrompt | None:
    """Truncate a row's prompt to at most `limit` tokens; None if it does not fit.

    The oldest turns are removed first. A leading system message stays, and the next message is a user turn. If that is
    not enough and `by_tokens`, the first words of the last user turn are removed; so is the system message, if it
    leaves that turn less than MIN_PROMPT_SHARE.
    Raises: UserError if the template cannot render the messages.
    """
    messages, variables = row.prompt, row.variables
    ids = template.prompt_ids(messages, variables)
    if len(ids) <= limit:
        return FittedPrompt(ids, messages)
    system = [message for message in messages[:1] if message.role == "system"]
    starts = [i for i, message in enumerate(messages) if message.role == "user" and i > len(system)]

    def without_oldest_turns(start: int) -> Sequence[Message]:
        return [*system, *messages[start:]]

    # Fewer turns have fewer tokens, so the first that fits is found by halving: a dialogue may have thousands of turns.
    fits = bisect_left(
        starts, True, key=lambda start: len(template.prompt_ids(without_oldest_turns(start), variables)) <= limit
    )
    if fits < len(starts):
        remaining = without_oldest_turns(starts[fits])
        return FittedPrompt(template.prompt_ids(remaining, variables), remaining)
    remaining = without_oldest_turns(starts[-1]) if starts else messages
    for candidate in (remaining, remaining[len(system) :]) if by_tokens else ():
        fitted = _keep_last_words(template, replace(row, prompt=tuple(candidate)), limit)
        if fitted is not None:
            return fitted
    return None


def _keep_last_words(template: Template, row: Row, limit: int) -> FittedPrompt | None:
    """The row's prompt, with as many last words of the last user turn as fit; None if too few fit."""
    messages = row.prompt
    turn = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if turn is None:
        return None
    content = messages[turn].content
    starts = [match.start() for match in WORD.finditer(content)][-limit:]  # each has at least one token
    if not starts:
        return None

    def prompt_from(start: int) -> FittedPrompt:
        text = content[start:].lstrip() if start else content
        shortened = [*messages[:turn], Message("user", text), *messages[turn + 1 :]]
        return FittedPrompt(template.prompt_ids(shortened, row.variables), shortened)

    sizes = template.token_counts([content[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)])
    available = limit - len(prompt_from(starts[-1]).ids) + sizes[-1]
    totals = list(accumulate(reversed(sizes)))  # tokens of the last word, of the last two, ...
    count = sum(total <= available for total in totals)
    if count < len(starts) and available < MIN_PROMPT_SHARE * limit:
        return None
    for start in starts[len(starts) - count :]:  # a text may have more tokens than its words have alone
        prompt = prompt_from(start)
        if len(prompt.ids) <= limit:
            return prompt
    return None
