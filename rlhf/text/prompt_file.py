"""Prompts from a file: JSON lines with a column `prompt`, or plain text with one prompt per line."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rlhf.config import Tree, suggest
from rlhf.errors import UserError
from rlhf.text.messages import read_message, require_text, row_variables, short_json
from rlhf.text.strict_json import parse_record
from rlhf.types import Message, Row

TRANSCRIPT = re.compile(r"\s*Human:")


def read_prompts(path: str) -> list[tuple[str, Row]]:
    """(file:line, row) of every line that is not blank. Other columns of a JSON line become columns of the row.

    Raises: UserError with file:line at the first invalid line.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".jsonl", ".txt"):
        raise UserError(
            f"--prompts {path}: expected a .jsonl file with a column 'prompt', or a .txt file with one prompt per line"
        )
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"--prompts {path}: cannot be read ({error.strerror}); name a .jsonl or .txt file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        location = f"{path}:{number}"
        text = _decode(line, location)
        if text.strip():
            row = _json_row(text, location) if kind == ".jsonl" else Row((Message("user", text),))
            rows.append((location, row))
    return rows


def different(lines: list[tuple[str, Row]]) -> list[tuple[str, Row]]:
    """The lines without those whose prompt, variables and columns are those of an earlier one."""
    first: dict[str, tuple[str, Row]] = {}
    for location, row in lines:
        key = json.dumps([format_prompt(row.prompt), row.variables, row.columns], sort_keys=True)
        first.setdefault(key, (location, row))
    return [*first.values()]


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


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        problem = f"got byte 0x{line[error.start]:02x} at offset {error.start} of the line"
        raise UserError(f"{location}: {problem}, expected UTF-8; convert the file, e.g. with iconv") from None


def _json_row(line: str, location: str) -> Row:
    record = parse_record(line, location)
    if "prompt" not in record:
        columns = ", ".join(record) or "none"
        raise UserError(f"{location}: no column 'prompt'; have {columns}{suggest('prompt', list(record))}")
    prompt = record.pop("prompt")
    variables, _ = row_variables(record, location)
    return Row(_messages(prompt, location), columns=record, variables=variables, location=location)


def _messages(prompt: object, location: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        if is_transcript(prompt):
            expected = 'its turns as messages, [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]'
            raise UserError(f"{location}: prompt: got a transcript, {short_json(prompt)}, expected {expected}")
        return (Message("user", _content(prompt, f"{location}: prompt")),)
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{location}: prompt: got {short_json(prompt)}, expected text, or a list of messages")
    messages = tuple(read_message(value, f"{location}: prompt[{i}]") for i, value in enumerate(prompt))
    for i, message in enumerate(messages):
        if not message.keys:
            _content(message.content, f"{location}: prompt[{i}].content")
    if messages[-1].role not in ("user", "tool"):
        raise UserError(f"{location}: prompt: the last message has the role '{messages[-1].role}', expected user")
    return messages


def is_transcript(text: str) -> bool:
    """Whether a text begins with `Human:` and either has turns in paragraphs or ends in `Assistant:`."""
    return bool(TRANSCRIPT.match(text)) and (has_paragraphs(text) or text.rstrip().endswith("Assistant:"))


def has_paragraphs(text: str) -> bool:
    """Whether the turns of a transcript are paragraphs."""
    return text.startswith("\n\n") or "\n\nAssistant:" in text


def _content(value: object, location: str) -> str:
    text = require_text(value, location)
    if not text.strip():
        raise UserError(f"{location}: got {short_json(text)}, expected text")
    return text
