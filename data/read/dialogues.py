"""Messages in the columns of a record, in the ways that datasets write them.

Text is a string, or a list of messages {role, content} or {from, value}. A string that begins `\\n\\nHuman:` is a
dialogue.
"""

import re
from itertools import pairwise

from data.read.columns import before_response, dialogue
from data.read.records import Record, checked, shown, text
from rlhf.errors import UserError
from rlhf.types import Message

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "system",
}
DIALOGUE = re.compile(r"\s*Human:")
TURN = re.compile(r"(?:^|\s+)(Human|Assistant):")


def messages(record: Record, column: str, where: str) -> tuple[Message, ...]:
    """A list of messages, at least one; neighbouring ones of one role become one."""
    values = record[column]
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: {column}: got {shown(values)}, expected a list of messages {{role, content}}")
    turns = tuple([_message(value, where, column, i) for i, value in enumerate(values)])
    if any(one.role == other.role for one, other in pairwise(turns)):
        return dialogue((turn.role, turn.content) for turn in turns)
    return turns


def _message(value: object, where: str, column: str, i: int) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {column}[{i}]: got {shown(value)}, expected a message {{role, content}}")
    role, content = value.get("role"), value.get("content")
    role = value.get("from") if role is None else role
    content = value.get("value") if content is None else content
    if not isinstance(role, str):
        raise UserError(f"{where}: {column}[{i}]: got {shown(value)}, expected a message with a role")
    known = ROLES.get(role) or ROLES.get(role.lower())
    if not known:
        expected = "expected system, user or assistant (or human, gpt); calls of tools cannot be used"
        raise UserError(f"{where}: {column}[{i}]: got the role {shown(role)}, {expected}")
    if type(content) is str and content.isascii():
        return Message(known, content)
    return Message(known, checked(content, f"{where}: {column}[{i}].content"))


def prompt_in(record: Record, column: str, where: str) -> tuple[Message, ...]:
    """The prompt in a column, which ends in the user's turn.

    An `instruction` has its `input` or `context` on the next line; `history` is the pairs [said, replied] before it,
    and `system` a message before all.
    Raises: UserError, Unusable.
    """
    if isinstance(record[column], list):
        return after_system(record, before_response(messages(record, column, where)), where)
    words = text(record, column, where)
    if column == "instruction":
        parts = (optional(record, part, where) for part in ("input", "context"))
        words = "\n".join(filter(None, (words, *parts)))
        before = _history(record, where)
    else:
        before = ()
    turns = _turns(words, f"{where}: {column}") if _is_dialogue(words) else (Message("user", words),)
    return after_system(record, before + turns, where)


def _is_dialogue(words: str) -> bool:
    """Whether a text begins with the speaker `Human:`; its paragraphs show that, or the `Assistant:` at its end."""
    return bool(DIALOGUE.match(words)) and (_in_paragraphs(words) or words.rstrip().endswith("Assistant:"))


def _in_paragraphs(words: str) -> bool:
    return words.startswith("\n\n") or "\n\nAssistant:" in words


def parse_dialogue(words: str, where: str) -> tuple[Message, ...]:
    """The turns of a dialogue written as `\\n\\nHuman: ...\\n\\nAssistant: ...`, without the spaces around them.

    Neighbouring turns of one speaker, which a turn that quotes a marker leaves behind, become one.
    Raises: UserError if the text does not begin with a human's turn.
    """
    before, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", words)
    if before.strip() or not parts or parts[0] != "Human":
        raise UserError(f"{where}: got text that begins {words[:20]!r}, expected a dialogue: '\\n\\nHuman: ...'")
    return dialogue((ROLES[who.lower()], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True))


def _turns(words: str, where: str) -> tuple[Message, ...]:
    """The turns of a dialogue whose speakers begin paragraphs, or stand anywhere (` Human: ... Assistant:`)."""
    if _in_paragraphs(words):
        return before_response(parse_dialogue(words.lstrip(), where))
    _, *parts = TURN.split(words)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return before_response(dialogue((ROLES[speaker.lower()], said.strip()) for speaker, said in turns))


def optional(record: Record, column: str, where: str) -> str:
    """The text in a column; empty where it is null or not there."""
    return "" if record.get(column) is None else text(record, column, where)


def _history(record: Record, where: str) -> tuple[Message, ...]:
    turns: list[Message] = []
    pairs = record.get("history") or []
    if not isinstance(pairs, list):
        raise UserError(f"{where}: history: got {shown(pairs)}, expected a list of pairs")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{where}: history[{i}]: got {shown(pair)}, expected [what the user said, the reply]")
        said = [checked(words, f"{where}: history[{i}]") for words in pair]
        turns += [Message("user", said[0]), Message("assistant", said[1])]
    return tuple(turns)


def after_system(record: Record, prompt: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """The prompt behind the message in the column `system`, unless it has a system message of its own."""
    words = optional(record, "system", where)
    return (Message("system", words), *prompt) if words and (not prompt or prompt[0].role != "system") else prompt


def response_in(record: Record, column: str, where: str) -> tuple[tuple[Message, ...], str]:
    """(the messages before the response, which many datasets repeat here; the response)."""
    value = record[column]
    if not isinstance(value, list | dict):
        return (), text(record, column, where)
    *before, last = messages({column: value if isinstance(value, list) else [value]}, column, where)
    if last.role != "assistant":
        raise UserError(f"{where}: {column}: got a last message of role '{last.role}', expected 'assistant'")
    return tuple(before), last.content


def joined(record: Record, column: str, before: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """The prompt in a column, and the messages before the response as far as they do not repeat it."""
    prompt = prompt_in(record, column, where)
    if not before:
        return prompt
    if isinstance(record[column], str) or before[: len(prompt)] == prompt:
        return after_system(record, before_response(before), where)
    return before_response(prompt + before)


def reply(record: Record, prompt_column: str, response: str) -> str:
    """A response as it is; after a dialogue in one string, without the spaces and the speaker before it."""
    prompt = record[prompt_column]
    if isinstance(prompt, str) and _is_dialogue(prompt):
        return response.strip().removeprefix("Assistant:").strip()
    return response
