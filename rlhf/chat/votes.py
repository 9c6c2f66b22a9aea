"""Votes as rows of preferences, which every stage reads: {prompt, response_a, response_b, preference, ...}."""

import datetime
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlhf.chat.responses import Measures, Response
from rlhf.config import Tree
from rlhf.errors import UserError
from rlhf.text.prompt_file import format_prompt
from rlhf.types import Message

Preference = Literal["a", "b", "tie"]
EDITED = "edited by a person"
"""in place of a policy: who wrote a better answer"""


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


def row(
    messages: Sequence[Message],
    texts: tuple[str, str],
    preference: Preference,
    policies: tuple[str, str],
    details: Mapping[str, object],
) -> Tree:
    """A row of preferences. The columns after `preference` are for people; training does not use them."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    sides = {"response_a": texts[0], "response_b": texts[1], "preference": preference}
    return (
        {"prompt": format_prompt(messages)}
        | sides
        | {"policy_a": policies[0], "policy_b": policies[1]}
        | dict(details)
        | {"time": now}
    )


def measures_columns(measures: Sequence[Measures | None]) -> dict[str, float | None]:
    """score_a, kl_a, score_b, kl_b; None where nothing was measured."""
    return {
        f"{name}_{side}": None if numbers is None else getattr(numbers, name)
        for side, numbers in zip("ab", measures, strict=True)
        for name in ("score", "kl")
    }


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
