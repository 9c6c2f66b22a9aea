"""One message of a dialogue as datasets write it: role, content, and the keys beside them.

A key with a value is never dropped in silence. Flags of the loss and labels are understood here; every other key goes
to the chat template, and a row with a key that the template does not read is refused.
"""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.text.rendering import MARK, Unrenderable, render
from rlhf.text.templates import RESERVED, THOUGHT_KEYS, thought_form, words_of
from rlhf.types import Message, Record, Row

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
FLAGS = ("weight", "loss", "loss_weight", "loss_mask", "train", "training", "trainable")
"""keys that say whether an assistant turn counts in the loss: 0 or 1, true or false"""
LABELS = frozenset(
    (
        "id", "index", "turn", "turn_identifier", "timestamp", "created_at", "language", "lang", "country", "state",
        "hashed_ip", "header", "toxic", "redacted", "model", "source", "score", "rating", "tokens", "hash",
    )
)  # fmt: skip
"""keys that describe a message and are no part of its text"""
KWARGS = "chat_template_kwargs"
CURE = "choose another --chat-template"
OF_RESULTS = frozenset(("name", "tool_call_id"))
"""labels of what a tool returned, which a template may leave out"""


def read_message(value: object, location: str) -> Message:
    """A message {role, content} or {from, value}. Raises: UserError"""
    if not isinstance(value, dict):
        raise UserError(f"{location}: got {short_json(value)}, expected a message {{role, content}}")
    role, content = value.get("role"), value.get("content")
    role = value.get("from") if role is None else role
    content = value.get("value") if content is None else content
    if not isinstance(role, str):
        raise UserError(f"{location}: got {short_json(value)}, expected a message with a role")
    standard_role = ROLES.get(role) or ROLES.get(role.lower())
    if not standard_role:
        expected = "expected system, user, assistant or tool (or human, gpt)"
        raise UserError(f"{location}: got the role {short_json(role)}, {expected}")
    if len(value) == 2 and type(content) is str and content.isascii() and role != "function_call":
        return Message(standard_role, content)
    keys, learned = _keys(value, location)
    if role == "function_call":
        calls = read_json(content, f"{location}.value")
        keys["tool_calls"], content = calls if isinstance(calls, list) else [calls], ""
    if "tool_calls" in keys:
        keys["tool_calls"] = _calls(keys["tool_calls"], f"{location}.tool_calls")
    if content is None and keys:
        content = ""
    return Message(standard_role, _text(content, f"{location}.content"), keys, learned)


def _keys(value: Tree, location: str) -> tuple[Tree, bool]:
    """(keys for the template, whether the turn counts in the loss)."""
    keys, learned = {}, True
    for key, item in value.items():
        if key in ("role", "content", "from", "value") or key in LABELS or item in (None, "", [], {}):
            continue
        if key in FLAGS:
            if item not in (0, 1):
                raise UserError(f"{location}.{key}: got {short_json(item)}, expected 0 or 1, true or false")
            learned = learned and bool(item)
        else:
            keys[key] = item
    return keys, learned


def _text(content: object, location: str) -> str:
    """The content as text; parts {type: text, text} are joined."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(require_text(part.get("text"), f"{location}[{i}].text") for i, part in enumerate(content))
    return require_text(content, location)


def _calls(value: object, location: str) -> list[Tree]:
    """Calls of tools as templates read them: {type, function: {name, arguments}}, with the arguments as an object."""
    if not isinstance(value, list):
        raise UserError(f"{location}: got {short_json(value)}, expected a list of calls")
    return [_call(call, f"{location}[{i}]") for i, call in enumerate(value)]


def _call(value: object, location: str) -> Tree:
    call = read_json(value, location)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{location}: got {short_json(value)}, expected a call with the name of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = read_json(arguments, f"{location}.arguments")
    labels = {key: call[key] for key in ("id",) if key in call}
    return {**labels, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def require_text(value: object, location: str) -> str:
    """`value`, if it is text that UTF-8 can encode.

    Raises: UserError for another type, or for half a surrogate pair, which no tokenizer accepts.
    """
    if not isinstance(value, str):
        raise UserError(f"{location}: got {short_json(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{location}: got half a surrogate pair at character {error.start}, expected text") from None
    return value


def short_json(value: object) -> str:
    """A value as JSON on one line of at most 60 characters."""
    line = json.dumps(value, default=str)
    return line if len(line) <= 60 else line[:57] + "..."


def read_json(value: object, location: str) -> Any:
    """`value`; a text is parsed as JSON, as many datasets store nested values."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise UserError(f"{location}: got {short_json(value)}, expected JSON") from None


def row_variables(columns: Record, location: str) -> tuple[Tree, float]:
    """(`Row.variables`, `Row.weight`) of the columns tools, chat_template_kwargs and weight, which are removed."""
    variables = read_json(columns.pop(KWARGS, None) or {}, f"{location}: {KWARGS}")
    if not isinstance(variables, dict):
        raise UserError(f"{location}: {KWARGS}: got {short_json(variables)}, expected an object")
    variables = {name: value for name, value in variables.items() if value is not None}
    tools = read_json(columns.pop("tools", None) or [], f"{location}: tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{location}: tools: got {short_json(tools)}, expected a list of descriptions of functions")
    weight = columns.pop("weight", None)
    if weight is None or weight == "":
        weight = 1.0
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0 <= weight < math.inf:
        raise UserError(f"{location}: weight: got {short_json(weight)}, expected a number of at least 0")
    return variables | ({"tools": tools} if tools else {}), float(weight)


def variable_columns(row: Row) -> Tree:
    """The columns tools and chat_template_kwargs of a row, as far as it has them: the inverse of `row_variables`."""
    kwargs = {name: value for name, value in row.variables.items() if name != "tools"}
    tools = {"tools": row.variables["tools"]} if "tools" in row.variables else {}
    return tools | ({KWARGS: kwargs} if kwargs else {})


def unread(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """What of a row the chat template would leave out in silence, as an error message; else an empty text."""
    answers = [Message("assistant", "", keys) for keys in (row.response_keys, row.rejected_keys)]
    messages = [*row.prompt, *answers]
    template = str(tokenizer.chat_template)
    for role in {message.role for message in row.prompt} & {"system", "tool"}:
        if not writes_role(role, tokenizer):
            return f"the chat template does not write messages of the role {role}; {CURE}"
    keyed = [message for message in messages if message.keys]
    if not keyed and not row.variables:
        return ""
    words = words_of(template)
    thoughts = () if thought_form(template) == "none" else THOUGHT_KEYS
    for message in keyed:
        read = words.keys | {*thoughts, *(OF_RESULTS if message.role == "tool" else ())}
        for key in message.keys:
            if key not in read:
                return f"the chat template does not read the key '{key}' of a message; remove it, or {CURE}"
    for name in row.variables:
        if name not in words.variables or name in RESERVED:
            column = name if name == "tools" else f"{KWARGS}.{name}"
            return f"the chat template does not read '{column}'; remove it, or {CURE}"
    return ""


@functools.lru_cache(maxsize=64)
def writes_role(role: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes a message of this role, and otherwise than one of the user or the assistant."""
    first, others = (Message("user", "x"), Message("assistant", "y")), (Message("user", "z"),)

    def written(as_role: str) -> str:
        message = Message(as_role, MARK)
        return render(tokenizer, [(message, *others) if role == "system" else (*first, message, *others)])[0]

    try:
        text = written(role)
    except Unrenderable:
        return True  # then it refuses each row itself, or needs what a row has
    return MARK in text and (role == "system" or text not in (written("user"), written("assistant")))


def format_prompt(prompt: Sequence[Message]) -> str | list[Tree]:
    """A prompt as a value of the column `prompt`: the text of a single user message, else the list of messages.

    A text that starts with `Human:` would be read as a dialogue, so it is written as a list of messages too.
    """
    if not prompt:
        return ""
    if len(prompt) == 1 and prompt[0].role == "user" and not prompt[0].content.lstrip().startswith("Human:"):
        return prompt[0].content
    return [{"role": message.role, "content": message.content, **message.keys} for message in prompt]


def prompt_text(prompt: str | list[Tree]) -> str:
    """A value of `format_prompt` as text; the messages of a dialogue begin with their roles."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
