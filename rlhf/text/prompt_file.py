"""Prompts from a file: JSON lines with a column `prompt`, or plain text with one prompt a line; also written."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf.config import suggest
from rlhf.errors import UserError
from rlhf.types import Message, Row

ROLES = ("system", "user", "assistant")


def read_prompts(place: str) -> list[tuple[str, Row]]:
    """(file:line, row) of every line that is not blank. What else a row has goes into its columns.

    Raises: UserError with file:line at the first line that is no prompt.
    """
    readers: dict[str, Callable[[str, str], Row]] = {".jsonl": _json_row, ".txt": _text_row}
    read = readers.get(Path(place).suffix.lower())
    if read is None:
        raise UserError(
            f"--prompts {place}: expected a .jsonl file with a column 'prompt', or a .txt of a prompt a line"
        )
    try:
        lines = Path(place).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"--prompts {place}: cannot be read ({error.strerror}); name a .jsonl or .txt file") from None
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{place}:{number}"
        text = _decoded(line, where)
        if text.strip():
            rows.append((where, read(text, where)))
    return rows


def written_prompt(prompt: Sequence[Message]) -> str | list[dict[str, str]]:
    """A prompt as a value of the column `prompt`: the text of a single user's message, else the messages.

    A text that begins as a dialogue does (`Human: ...`), which datasets are read as, is written as a message too.
    """
    if not prompt:
        return ""
    if len(prompt) == 1 and prompt[0].role == "user" and not prompt[0].content.lstrip().startswith("Human:"):
        return prompt[0].content
    return [{"role": message.role, "content": message.content} for message in prompt]


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        got = f"got byte 0x{line[error.start]:02x} at offset {error.start} of the line"
        raise UserError(f"{where}: {got}, expected UTF-8; convert the file, e.g. with iconv") from None


def _text_row(line: str, where: str) -> Row:
    return Row((Message("user", line),))


def _json_row(line: str, where: str) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); expected one object a line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: got a {type(record).__name__}, expected an object with a 'prompt'")
    if "prompt" not in record:
        known = ", ".join(record) or "none"
        raise UserError(f"{where}: no column 'prompt'; have {known}{suggest('prompt', list(record))}")
    prompt = record.pop("prompt")
    return Row(_messages(prompt, where), columns=record)


def _messages(prompt: Any, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message("user", _content(prompt, f"{where}: prompt")),)
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{where}: prompt: got {_short(prompt)}, expected text, or a list of messages")
    messages = tuple(_message(value, f"{where}: prompt[{i}]") for i, value in enumerate(prompt))
    if messages[-1].role != "user":
        raise UserError(f"{where}: prompt: ends in a message of role '{messages[-1].role}', expected the user's")
    return messages


def _message(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ROLES:
        raise UserError(f"{where}: got {_short(value)}, expected {{role: {' or '.join(ROLES)}, content: text}}")
    return Message(role, _content(value.get("content"), f"{where}.content"))


def _content(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: got {_short(text)}, expected text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: got half a surrogate pair, which is no text; write the row anew") from None
    return text


def _short(value: Any) -> str:
    said = ascii(value)
    return said if len(said) <= 80 else said[:77] + "..."
