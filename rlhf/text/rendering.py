"""Messages become text by a chat template, and what each message says keeps its place in it.

Templates may come from a stranger, so transformers' sandbox alone renders them.
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
"""of CPU time, for the first renderings of a template"""

MARK = "\ue000"
"""stands for a message's content where the frame around it is looked at"""

RENDER_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a template's own mistakes raise."""


def render(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Sequence[Message]], add_generation_prompt: bool = True
) -> list[str]:
    """The text of each dialogue, up to where a response begins or without that.

    Raises: UserError that names the roles of the first dialogue the template does not render.
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
        raise UserError(
            f"the chat template{_line_of(error)} does not render messages of roles ({roles}): {reason}"
        ) from None


def _line_of(error: BaseException) -> str:
    """`, line 3,` of the template, from a traceback; for an Exception Jinja has made its frames point there."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            template = trace.tb_frame.f_globals.get("__jinja_template__")
            line = template.get_corresponding_lineno(trace.tb_lineno) if template else trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}," if line else ""


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Try the template, if it may be a stranger's, in a process with limits.

    Raises: UserError if it does not render one user message, with its content, or takes more time or memory.
    """
    if template_name(str(tokenizer.chat_template)) is not None:
        _try_template(tokenizer)
    else:
        limits.run_limited(partial(_try_template, tokenizer), "the chat template", MAX_SECONDS)


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        text = render(tokenizer, [[Message("user", MARK)]])[0]
        written(tokenizer)  # other roles may run through other lines
        turn_end(tokenizer)
    except limits.Late as error:
        raise UserError(f"the chat template{_line_of(error)} still runs after {MAX_SECONDS:g} seconds") from None
    if MARK not in text:
        raise UserError("the chat template leaves out what a user's message says; expected message['content'] in it")
    bos = tokenizer.bos_token
    if bos and text.startswith(bos + bos):
        raise UserError(f"the chat template writes the BOS token {bos} twice at its start; remove one")


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes between a prompt and the assistant's content if that is white space, and what after it.

    Raises: UserError if the template refuses an assistant's message.
    """
    user = Message("user", "x")
    whole = render(tokenizer, [[user, Message("assistant", MARK)]], add_generation_prompt=False)[0]
    before, _, after = whole.partition(MARK)
    prefix = before.removeprefix(render(tokenizer, [[user]])[0])
    return prefix if prefix.isspace() else "", after


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token with which the template closes an assistant's turn; None if it writes text there, or nothing."""
    try:
        _, after = frame(tokenizer)
    except UserError:
        return None  # a template for single prompts
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if not str(token).isspace()]
    return max((token for token in tokens if after.lstrip().startswith(token)), key=len, default=None)


def written(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template, and all that it writes around messages of the roles it takes."""
    dialogues = [[Message(role, MARK) for role in roles] for roles in (("user", "assistant"), ("system", "user"))]
    rendered = [str(tokenizer.chat_template)]
    for messages in dialogues:
        with contextlib.suppress(UserError):
            rendered += render(tokenizer, [messages])
    return "\n".join(rendered)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered prompt."""

    text: str
    message: int | None = None
    """number of the message it is the content of; None: the template wrote it"""


def pieces(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Piece]:
    """The rendered prompt cut at each message's content: template, content, template, content, ..., template.

    Found by rendering the messages again with marks around their contents, never by looking for what they say.
    Raises: UserError if the template does more to a content than trim it or change it letter by letter.
    """
    text = render(tokenizer, [messages])[0]
    said = "".join(message.content for message in messages)
    marks = tuple(islice((c for c in map(chr, range(0xE000, 0x110000)) if c not in said), 3))
    filled = [i for i, message in enumerate(messages) if message.content.strip()]
    for marked in (range(len(messages)), filled):  # a template may ask whether there is any content
        again = [_with_marks(message, i, marks) if i in marked else message for i, message in enumerate(messages)]
        found = _align(render(tokenizer, [again])[0], text, marks)
        if found:
            return found
    raise UserError(
        "the chat template rewrites messages, so what they say (a special token's text, an assistant's turn) cannot be "
        "told from what it writes itself; choose another --chat-template, or change that row"
    )


def _with_marks(message: Message, number: int, marks: tuple[str, ...]) -> Message:
    start, middle, end = marks
    return Message(message.role, f"{start}{number}{middle}{message.content}{end}")


def _align(marked: str, text: str, marks: tuple[str, ...]) -> list[Piece]:
    """The pieces of `text`, of which `marked` is the rendering with marks; none if the two do not agree."""
    start, middle, end = marks
    first, *rest = re.split(f"{start}([0-9]+){middle}(.*?){end}", marked, flags=re.DOTALL)
    if re.search(f"[{''.join(marks)}]", first + "".join(rest)):
        return []  # a mark has lost its partner
    found, place = [Piece(first)], len(first)
    for number, content, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        forms = (content, content.lstrip(), content.rstrip(), content.strip())  # many templates trim
        form = next((form for form in forms if text.startswith(form + after, place)), None)
        if form is None:
            return []
        found += [Piece(form, int(number)), Piece(after)]
        place += len(form) + len(after)
    return found if text.startswith(first) and place == len(text) else []


def cut_at(tokens: re.Pattern[str], cut: Sequence[Piece]) -> Iterator[tuple[str, bool]]:
    """A rendered prompt as (text, whether it is one of `tokens`, a pattern in parentheses, that the template wrote)."""
    stretch = ""
    for piece in cut:
        parts = tokens.split(piece.text) if piece.message is None else [piece.text]
        for number, part in enumerate(parts):  # text, token, text, ..., text
            stretch += "" if number % 2 else part
            if number % 2:
                yield from [(stretch, False), (part, True)]
                stretch = ""
    yield stretch, False


def turns(cut: Sequence[Piece], messages: Sequence[Message], around: tuple[str, str], eos: str) -> Iterator[slice]:
    """The characters of each assistant's turn in a rendered prompt: the content with what is `around` it, and EOS."""
    before, after = around
    place = len(cut[0].text)
    for left, piece, right in zip(cut[::2], cut[1::2], cut[2::2], strict=False):  # template, content, template
        start, end = place, place + len(piece.text)
        place = end + len(right.text)
        if piece.message is None or messages[piece.message].role != "assistant":
            continue
        closed = len(after + eos) if right.text.startswith(after + eos) else 0
        if start == end:  # of an empty response EOS alone, as ever
            start += len(after) if closed else 0
        elif left.text.endswith(before):
            start -= len(before)
        yield slice(start, end + closed)
