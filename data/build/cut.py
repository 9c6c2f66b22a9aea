"""What gives way where a prompt and its responses are too long together.

In this order: the oldest turns, whole; where tokens may go, the first words of the last user's turn, the end of a
response, and the system message. What the template writes around a turn stays, so a prompt is always one that the
template renders, and it never ends up without words of the user's.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from data.read.records import Unusable
from rlhf.text.tokenizer import Template
from rlhf.types import Message

LEAST = 0.25
"""What words of the last user's turn keep, if they are so many: this share of `max_length` before the response gives
way, and of the prompt's limit before the system message goes. A fourth of 512, the default, holds whole all last turns
of HH, 96 of a hundred of OASST, and 82 in pairs with long instructions; the response has three times as much."""
WORDS = re.compile(r"\s*\S{1,16}")
"""A prompt is cut before one of these: a word, or as many characters of what has no spaces."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt that fits."""

    ids: Ids
    messages: Sequence[Message]
    """what is left of it"""


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a row was cut to length."""

    prompt: bool = False
    response: bool = False
    """its end, so that it has no EOS; of a pair that of either side"""


def fit_prompt(template: Template, messages: Sequence[Message], limit: int, by_tokens: bool) -> Fitted:
    """A prompt in at most `limit` tokens.

    Whole oldest turns go first, a leading system message staying; what is left begins with a user's turn. If that is
    not enough and `by_tokens`, the first words of the last user's turn go; and the system message, if it leaves that
    turn less than its share.
    Raises: UserError if the template cannot render them; Unusable if it does not fit.
    """
    for kept in _shorter(messages):
        ids = template.prompt_ids(kept)
        if len(ids) <= limit:
            return Fitted(ids, kept)
    system = [message for message in kept[:1] if message.role == "system"]
    for left in (kept, kept[len(system) :]) if by_tokens else ():
        fitted = _last_words(template, left, limit)
        if fitted is not None:
            return fitted
    raise Unusable("prompt too long")


def _shorter(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, and then without their oldest turns, ever fewer."""
    yield messages
    system = [message for message in messages[:1] if message.role == "system"]
    for start, message in enumerate(messages):
        if message.role == "user" and start > len(system):
            yield [*system, *messages[start:]]


def _last_words(template: Template, messages: Sequence[Message], limit: int) -> Fitted | None:
    """The messages with as many last words of the last user's turn as fit; None if those are too few."""
    turn = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if turn is None:
        return None
    content = messages[turn].content
    starts = [match.start() for match in WORDS.finditer(content)][-limit:]  # each has a token, so no more than that fit
    if not starts:
        return None

    def fitted(start: int) -> Fitted:
        words = content[start:].lstrip() if start else content
        left = [*messages[:turn], Message("user", words), *messages[turn + 1 :]]
        return Fitted(template.prompt_ids(left), left)

    sizes = template.token_counts([content[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)])
    room = limit - len(fitted(starts[-1]).ids) + sizes[-1]
    totals = list(accumulate(reversed(sizes)))  # of the last word, the last two, ...
    fit = sum(total <= room for total in totals)
    if fit < len(starts) and room < LEAST * limit:
        return None
    for start in starts[len(starts) - fit :]:  # words together may have more tokens than each alone
        found = fitted(start)
        if len(found.ids) <= limit:
            return found
    return None
