"""Dialogues in the columns of a record, in the forms that datasets use.

A column holds text, or a list of messages {role, content} or {from, value}. Text that begins with `\\n\\nHuman:` is a
transcript: a dialogue written as one text.
"""

import re
from dataclasses import replace
from itertools import pairwise

from data.read.columns import as_prompt, merge_messages, read_value
from data.read.records import Record, read_text
from rlhf.errors import UserError
from rlhf.text.messages import ROLES, read_message, require_text, short_json
from rlhf.types import Message

TRANSCRIPT = re.compile(r"\s*Human:")
TURN = re.compile(r"(?:^|\s+)(Human|Assistant):")


def read_dialogue(record: Record, column: str, location: str) -> tuple[Message, ...]:
    """A list of messages, at least one. Consecutive messages of one role are merged."""
    values = read_value(record, column, location)
    if not isinstance(values, list) or not values:
        raise UserError(
            f"{location}: {column}: got {short_json(values)}, expected a list of messages {{role, content}}"
        )
    turns = tuple([read_message(value, f"{location}: {column}[{i}]") for i, value in enumerate(values)])
    if any(turn.role == following.role for turn, following in pairwise(turns)):
        return merge_messages(turns)
    return turns


def read_prompt(record: Record, column: str, location: str) -> tuple[Message, ...]:
    """The prompt in a column, which ends in the user's turn.

    The text of an `input` or `context` column follows an `instruction` on the next line. A `history` column holds the
    earlier turns as pairs [user, assistant]. The text of a `system` column becomes the first message.
    Raises: UserError, Unusable.
    """
    if isinstance(record[column], list):
        return with_system_message(record, as_prompt(read_dialogue(record, column, location)), location)
    text = read_text(record, column, location)
    history: tuple[Message, ...] = ()
    if column == "instruction":
        inputs = (read_optional_text(record, name, location) for name in ("input", "context"))
        text = "\n".join(filter(None, (text, *inputs)))
        history = _read_history(record, location)
    turns = _parse_prompt(text, f"{location}: {column}") if is_transcript(text) else (Message("user", text),)
    return with_system_message(record, history + turns, location)


def is_transcript(text: str) -> bool:
    """Whether a text begins with `Human:` and either has turns in paragraphs or ends in `Assistant:`."""
    return bool(TRANSCRIPT.match(text)) and (has_paragraphs(text) or text.rstrip().endswith("Assistant:"))


def has_paragraphs(text: str) -> bool:
    """Whether the turns of a transcript are paragraphs."""
    return text.startswith("\n\n") or "\n\nAssistant:" in text


def parse_transcript(text: str, location: str) -> tuple[Message, ...]:
    """The turns of `\\n\\nHuman: ...\\n\\nAssistant: ...`, without the spaces around them.

    Consecutive turns of one speaker are merged; a turn that quotes a marker splits into such turns.
    Raises: UserError if the text does not begin with a human turn.
    """
    before, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    if before.strip() or not parts or parts[0] != "Human":
        raise UserError(f"{location}: got text that begins {text[:20]!r}, expected a dialogue: '\\n\\nHuman: ...'")
    turns = zip(parts[::2], parts[1::2], strict=True)
    return merge_messages(Message(ROLES[speaker.lower()], turn.strip()) for speaker, turn in turns)


def _parse_prompt(text: str, location: str) -> tuple[Message, ...]:
    """The turns of a transcript. Speakers begin paragraphs, or follow any space (` Human: ... Assistant:`)."""
    if has_paragraphs(text):
        return as_prompt(parse_transcript(text.lstrip(), location))
    _, *parts = TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return as_prompt(merge_messages(Message(ROLES[speaker.lower()], turn.strip()) for speaker, turn in turns))


def read_optional_text(record: Record, column: str, location: str) -> str:
    """The text in a column; empty if the column is null or missing."""
    return "" if record.get(column) is None else read_text(record, column, location)


def _read_history(record: Record, location: str) -> tuple[Message, ...]:
    turns: list[Message] = []
    pairs = record.get("history") or []
    if not isinstance(pairs, list):
        raise UserError(f"{location}: history: got {short_json(pairs)}, expected a list of pairs [user, assistant]")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{location}: history[{i}]: got {short_json(pair)}, expected a pair [user, assistant]")
        user, assistant = (require_text(text, f"{location}: history[{i}]") for text in pair)
        turns += [Message("user", user), Message("assistant", assistant)]
    return tuple(turns)


def with_system_message(record: Record, prompt: tuple[Message, ...], location: str) -> tuple[Message, ...]:
    """The prompt, preceded by the text in the column `system` unless it has a system message already."""
    text = read_optional_text(record, "system", location)
    return (Message("system", text), *prompt) if text and (not prompt or prompt[0].role != "system") else prompt


def read_response(record: Record, column: str, location: str) -> tuple[tuple[Message, ...], Message]:
    """(messages before the response, the response). Many datasets repeat the prompt before each response."""
    value = record[column]
    if column == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
        return (), Message("assistant", str(value))  # to a question in numbers
    if not isinstance(value, list | dict):
        return (), Message("assistant", read_text(record, column, location))
    *before, last = read_dialogue({column: value if isinstance(value, list) else [value]}, column, location)
    if last.role != "assistant":
        raise UserError(f"{location}: {column}: got a last message of role '{last.role}', expected 'assistant'")
    return tuple(before), last


def read_response_text(record: Record, column: str, location: str) -> str:
    """The response of a list of several. Raises: UserError for one with more than a text."""
    response = read_response(record, column, location)[1]
    if response.keys or not response.learned:
        keys = ", ".join(response.keys) or "a flag of the loss"
        raise UserError(f"{location}: {column}: got {keys} beside the content, expected text; write pairs instead")
    return response.content


def join_prompt(record: Record, column: str, before: tuple[Message, ...], location: str) -> tuple[Message, ...]:
    """The prompt in a column, followed by those messages `before` the response that do not repeat it.

    A system message counts as repeated, also where only one of the two has it: that of the prompt comes first.
    Raises: UserError if the prompt is text that no turn of a whole dialogue repeats; Unusable.
    """
    prompt = read_prompt(record, column, location)
    if not before:
        return prompt
    (system, turns), (system_before, turns_before) = _divide_system(prompt), _divide_system(before)
    begins = bool(turns_before) and turns_before[0].role == "user"
    is_text = isinstance(record[column], str)
    if is_text and begins and not _repeats(record[column], before):
        raise UserError(
            f"{location}: {column}: got text that is in no turn of the dialogue before the response; expected one "
            "prompt: map the column that has it, or choose the shape that reads the dialogue alone, as in "
            "files,shape=chosen-rejected:PATH"
        )
    if (is_text and begins) or turns_before[: len(turns)] == turns:
        return with_system_message(record, as_prompt((system or system_before) + turns_before), location)
    return as_prompt(prompt + before)


def _repeats(text: str, turns: tuple[Message, ...]) -> bool:
    """Whether a prompt as text and a turn that is no answer are the same, or one holds the other, but for case and
    white space."""
    texts = (text, *(turn.content for turn in turns if turn.role != "assistant"))
    prompt, *contents = (" ".join(x.split()).casefold() for x in texts)
    return any(content in prompt or prompt in content for content in contents)


def _divide_system(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """(the system message at the beginning, if there is one, the others)."""
    count = int(bool(messages) and messages[0].role == "system")
    return messages[:count], messages[count:]


def strip_speaker(record: Record, prompt_column: str, response: Message) -> Message:
    """The response; if the prompt is a transcript, without the speaker `Assistant:` and the spaces around it."""
    prompt = record[prompt_column]
    if isinstance(prompt, str) and is_transcript(prompt):
        return replace(response, content=response.content.strip().removeprefix("Assistant:").strip())
    return response
