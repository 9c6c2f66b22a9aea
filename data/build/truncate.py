"""Truncation of rows whose prompt and responses are too long together.

Removed first are whole turns, the oldest ones. With `truncate tokens`, further cuts follow: the first words of the last
user turn, the end of a response, and the system message. The text that the template adds around turns stays. So a
prompt is always one that the template renders, and it always has words of the user.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from data.read.records import Unusable
from rlhf.text.tokenizer import Template
from rlhf.types import Message

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


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which parts of a row were truncated."""

    prompt: bool = False
    response: bool = False
    """a response lost its end and EOS; of a pair, one side or both"""


def fit_prompt(template: Template, messages: Sequence[Message], limit: int, by_tokens: bool) -> FittedPrompt:
    """Truncate a prompt to at most `limit` tokens.

    The oldest turns are removed first. A leading system message stays, and the next message is a user turn. If that is
    not enough and `by_tokens`, the first words of the last user turn are removed; so is the system message, if it
    leaves that turn less than MIN_PROMPT_SHARE.
    Raises: UserError if the template cannot render the messages; Unusable if the prompt does not fit.
    """
    for remaining in _without_oldest_turns(messages):
        ids = template.prompt_ids(remaining)
        if len(ids) <= limit:
            return FittedPrompt(ids, remaining)
    system = [message for message in remaining[:1] if message.role == "system"]
    for candidate in (remaining, remaining[len(system) :]) if by_tokens else ():
        fitted = _keep_last_words(template, candidate, limit)
        if fitted is not None:
            return fitted
    raise Unusable("prompt too long")


def _without_oldest_turns(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, then the messages without their oldest turns, one user turn fewer each time."""
    yield messages
    system = [message for message in messages[:1] if message.role == "system"]
    for start, message in enumerate(messages):
        if message.role == "user" and start > len(system):
            yield [*system, *messages[start:]]


def _keep_last_words(template: Template, messages: Sequence[Message], limit: int) -> FittedPrompt | None:
    """The messages, with as many last words of the last user turn as fit; None if too few fit."""
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
        return FittedPrompt(template.prompt_ids(shortened), shortened)

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
