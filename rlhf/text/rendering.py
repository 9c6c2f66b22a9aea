"""A chat template turns messages into text.

Templates may be untrusted, so only transformers' sandbox renders them.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.text.templates import THOUGHT_END, THOUGHT_KEYS, thought_form
from rlhf.types import Message

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
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Message]],
    add_generation_prompt: bool = True,
    variables: Sequence[Mapping[str, object]] = (),
) -> list[str]:
    """The text of each dialogue, with or without the prefix of the next response.

    variables: what the template gets beside the messages of each dialogue (`Row.variables`); empty: nothing for any
    Raises: Unrenderable, which names the roles of the first dialogue that the template cannot render.
    """
    if any(variables):
        return [
            _render(tokenizer, [messages], add_generation_prompt, own)[0]
            for messages, own in zip(dialogues, variables, strict=True)
        ]
    return _render(tokenizer, dialogues, add_generation_prompt, {}) if dialogues else []


def _render(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[Sequence[Message]],
    add_generation_prompt: bool,
    variables: Mapping[str, object],
) -> list[str]:
    dicts = [[message_dict(message, tokenizer) for message in messages] for messages in dialogues]
    options: Tree = {**variables, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        return list(map(str, tokenizer.apply_chat_template(dicts, **options)))
    except RENDER_ERRORS as error:
        if len(dialogues) > 1:
            return [_render(tokenizer, [messages], add_generation_prompt, variables)[0] for messages in dialogues]
        roles = ", ".join(message.role for message in dialogues[0])
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"the chat template{_line_of(error)} cannot render messages of roles ({roles}): {reason}"
        raise Unrenderable(message, reason) from None


def message_dict(message: Message, tokenizer: PreTrainedTokenizerBase) -> Tree:
    """A message as templates read it, with a thought under each usual name."""
    if not message.keys and THOUGHT_END not in message.content:
        return {"role": message.role, "content": message.content}
    message = folded(message, str(tokenizer.chat_template))
    thought = thought_of(message)
    names = dict.fromkeys(THOUGHT_KEYS, thought) if thought else {}
    return {"role": message.role, "content": message.content, **message.keys, **names}


def thought_of(message: Message) -> str:
    """The thought beside a message's content; empty if it has none."""
    return next((str(message.keys[key]) for key in THOUGHT_KEYS if message.keys.get(key)), "")


def folded(message: Message, template: str) -> Message:
    """The message with its thought where the template reads it: inside the content or beside it."""
    thought, form = thought_of(message), thought_form(template)
    if form == "inside" and thought:
        keys = {key: value for key, value in message.keys.items() if key not in THOUGHT_KEYS}
        content = f"<think>\n{thought}\n{THOUGHT_END}\n\n{message.content}"
        return replace(message, content=content, keys=keys)
    if form == "beside" and not thought and message.role == "assistant" and THOUGHT_END in message.content:
        before, _, answer = message.content.rpartition(THOUGHT_END)
        thought = before.strip().removeprefix("<think>").strip()
        keys = {THOUGHT_KEYS[0]: thought} if thought else {}  # gpt-oss writes a channel for an empty one, too
        return replace(message, content=answer.strip(), keys=message.keys | keys)
    return message


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
    """Render test messages. Raises: UserError if the template does not render a user message with its content."""
    text = render(tokenizer, [[Message("user", MARK)]])[0]
    if MARK not in text:
        raise UserError("the chat template leaves out the content of a user message; expected message['content'] in it")
    bos = tokenizer.bos_token
    if bos and text.startswith(bos + bos):
        raise UserError(f"the chat template writes the BOS token {bos} twice at its start; remove one")


def template_output(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's source, and everything that it writes around messages of the usual roles."""
    dialogues = [[Message(role, MARK) for role in roles] for roles in (("user", "assistant"), ("system", "user"))]
    rendered = [str(tokenizer.chat_template)]
    for messages in dialogues:
        with contextlib.suppress(UserError):
            rendered += render(tokenizer, [messages])
    return "\n".join(rendered)
