"""Votes as rows of preferences, which every stage reads: {prompt, response_a, response_b, preference, ...}."""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlhf.chat.responses import Response
from rlhf.errors import UserError

Preference = Literal["a", "b", "tie"]


def refusal(responses: Sequence[Response]) -> str:
    """Why responses must not train a reward model; an empty string if they may.

    A reward model reads every response with its end, and a response that was cut has none.
    """
    if not all(response.ended for response in responses):
        return "an answer was cut before its end; raise the response length, and try again"
    if not all(response.text.strip() for response in responses):
        return "an answer is empty"
    if len({response.text for response in responses}) < len(responses):
        return "the answers are equal"
    return ""


def append(path: Path, vote: Mapping[str, object]) -> None:
    """Append one row as a whole line, or nothing. Several processes may append at once.

    Raises: UserError if the file cannot be written.
    """
    line = json.dumps(vote, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _append_locked(descriptor, line)
        finally:
            os.close(descriptor)  # releases the lock
    except OSError as error:
        raise UserError(f"--votes {path}: cannot be written ({error.strerror}); name another file") from None


def _append_locked(descriptor: int, line: bytes) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":  # an editor may leave out the last line break
        line = b"\n" + line
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(28, os.strerror(28))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
