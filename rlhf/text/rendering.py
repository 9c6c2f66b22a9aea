"""A chat template turns messages into text, and the content of each message can be located in that text.

Templates may be untrusted, so only transformers' sandbox renders them.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.hub import limits
from rlhf.text.templates import template_name
from rlhf.types import Message

MAX_SECONDS = 5.0
"""CPU time for the first renderings of a template"""

MARK = "\ue000"
"""replaces a message's content when only the text around it matters"""

RENDER_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""The exceptions of a faulty template."""


class Unrenderable(UserError):
    """A dialogue that the chat template refuses. `reason`: what the template says."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def render(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Sequence[Message]], add_generation_prompt: bool = True
) -> list[str]:
    """The text of each dialogue, with or without the prefix of the next response.

    Raises: Unrenderable, which names the roles of the first dialogue that the template cannot render.
    """
    dicts = [[{"role": message.role, "content": message.content} for message in messages] for messages in dialogues]
    if not dicts:
        return []
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        return list(map(str, tokenizer.apply_chat_template(dicts, **options)))
    except RENDER_ERRORS as error:
        if len(dialogues) > 1:
            return [render(tokenizer, [messages], add_generation_prompt)[0] for messages in dialogues]
        roles = ", ".join(message.role for message in dialogues[0])
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"the chat template{_line_of(error)} cannot render messages of roles ({roles}): {reason}"
        raise Unrenderable(message, reason) from None


def last_question(messages: Sequence[Message]) -> str:
    """The content of the user's last turn: a prompt as a person reads it, without the template's words; else empty."""
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def _line_of(error: BaseException) -> str:
    """`, line 3,` of the template, from a traceback, whose frames Jinja maps to the template; else empty."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            template = trace.tb_frame.f_globals.get("__jinja_template__")
            line = template.get_corresponding_lineno(trace.tb_lineno) if template else trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}," if line else ""


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render test messages; an untrusted template does so in a process with limits.

    Raises: UserError if the template does not render a user message with its content, or exceeds the limits.
    """
    if template_name(str(tokenizer.chat_template)) is not None:
        _try_template(tokenizer)
    else:
        limits.run_limited(partial(_try_template, tokenizer), "the chat template", MAX_SECONDS)


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        text = render(tokenizer, [[Message("user", MARK)]])[0]
        template_output(tokenizer)  # other roles may use other lines of the template
        turn_end(tokenizer)
    except limits.TimeUp as error:
        raise UserError(f"the chat template{_line_of(error)} still runs after {MAX_SECONDS:g} seconds") from None
    if MARK not in text:
        raise UserError("the chat template leaves out the content of a user message; expected message['content'] in it")
    bos = tokenizer.bos_token
    if bos and text.startswith(bos + bos):
        raise UserError(f"the chat template writes the BOS token {bos} twice at its start; remove one")


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """(white space between a prompt and the assistant's content, all text after that content).

    Raises: UserError if the template refuses an assistant message.
    """
    user = Message("user", "x")
    text = render(tokenizer, [[user, Message("assistant", MARK)]], add_generation_prompt=False)[0]
    before, _, after = text.partition(MARK)
    prefix = before.removeprefix(render(tokenizer, [[user]])[0])
    return prefix if prefix.isspace() else "", after


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The added token with which the template ends an assistant turn; None if it ends in other text or in nothing."""
    try:
        _, after = frame(tokenizer)
    except UserError:
        return None  # a template for single prompts
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if not str(token).isspace()]
    return max((token for token in tokens if after.lstrip().startswith(token)), key=len, default=None)


def template_output(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's source, and everything that it writes around messages of the usual roles."""
    dialogues = [[Message(role, MARK) for role in roles] for roles in (("user", "assistant"), ("system", "user"))]
    rendered = [str(tokenizer.chat_template)]
    for messages in dialogues:
        with contextlib.suppress(UserError):
            rendered += render(tokenizer, [messages])
    return "\n".join(rendered)


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A part of a rendered prompt."""

    text: str
    message: int | None = None
    """number of the message whose content it is; None: the template wrote it"""


def split_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[PromptSegment]:
    """The rendered prompt, split at each message's content: template, content, template, content, ..., template.

    The messages are rendered again with marks around their contents; the contents themselves are not searched for.
    Raises: UserError if the template changes a content in another way than trimming it or mapping its characters.
    """
    text = render(tokenizer, [messages])[0]
    contents = "".join(message.content for message in messages)
    marks = tuple(islice((c for c in map(chr, range(0xE000, 0x110000)) if c not in contents), 3))
    not_empty = {i for i, message in enumerate(messages) if message.content.strip()}
    for to_mark in (range(len(messages)), not_empty):  # a template may test whether there is content
        marked = [_with_marks(message, i, marks) if i in to_mark else message for i, message in enumerate(messages)]
        segments = _align(render(tokenizer, [marked])[0], text, marks)
        if segments:
            return segments
    raise UserError(
        "the chat template rewrites messages, so the content of a message (a special token's text, an assistant turn) "
        "cannot be distinguished from the template's own text; choose another --chat-template, or change that row"
    )


def _with_marks(message: Message, number: int, marks: tuple[str, ...]) -> Message:
    start, middle, end = marks
    return Message(message.role, f"{start}{number}{middle}{message.content}{end}")


def _align(marked: str, text: str, marks: tuple[str, ...]) -> list[PromptSegment]:
    """The segments of `text`; `marked` is the same prompt with marks. Empty if the two do not agree."""
    start, middle, end = marks
    first, *parts = re.split(f"{start}([0-9]+){middle}(.*?){end}", marked, flags=re.DOTALL)
    if re.search(f"[{''.join(marks)}]", first + "".join(parts)):
        return []  # a mark without its counterpart
    segments, offset = [PromptSegment(first)], len(first)
    for number, content, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        forms = (content, content.lstrip(), content.rstrip(), content.strip())  # many templates trim
        form = next((form for form in forms if text.startswith(form + after, offset)), None)
        if form is None:
            return []
        segments += [PromptSegment(form, int(number)), PromptSegment(after)]
        offset += len(form) + len(after)
    return segments if text.startswith(first) and offset == len(text) else []


def split_special_tokens(tokens: re.Pattern[str], segments: Sequence[PromptSegment]) -> Iterator[tuple[str, bool]]:
    """A rendered prompt as (text, whether the text is a special token that the template wrote).

    tokens: a pattern of special tokens, with one group around it
    """
    ordinary = ""
    for segment in segments:
        texts = tokens.split(segment.text) if segment.message is None else [segment.text]
        for number, text in enumerate(texts):  # text, token, text, ..., text
            ordinary += "" if number % 2 else text
            if number % 2:
                yield from [(ordinary, False), (text, True)]
                ordinary = ""
    yield ordinary, False


def assistant_turns(
    segments: Sequence[PromptSegment], messages: Sequence[Message], white_space: tuple[str, str], eos: str
) -> Iterator[slice]:
    """The characters of each assistant turn in a rendered prompt: content, white space before and after it, and EOS."""
    before, after = white_space
    offset = len(segments[0].text)
    # template, content, template
    for left, segment, right in zip(segments[::2], segments[1::2], segments[2::2], strict=False):
        start, end = offset, offset + len(segment.text)
        offset = end + len(right.text)
        if segment.message is None or messages[segment.message].role != "assistant":
            continue
        closed = len(after + eos) if right.text.startswith(after + eos) else 0
        if start == end:  # an empty response is EOS alone
            start += len(after) if closed else 0
        elif left.text.endswith(before):
            start -= len(before)
        yield slice(start, end + closed)
