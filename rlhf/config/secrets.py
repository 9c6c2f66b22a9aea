"""Secrets have no place among options, which are written down and seen by every user of the machine."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.errors import UserError

NAMED = re.compile(r"token|key|secret|password|passwd|credential", re.IGNORECASE)
"""Environment variables whose values are secrets."""
SHORTEST = 8
"""characters of a secret; shorter values of such variables (`1`, `true`) are settings"""
LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\bBearer\s+\S{8,}|://[^/@\s:]+:[^/@\s]+@|\b(?:api[_-]?key|password|passwd|secret)=[^\s,]{4,}",
    re.IGNORECASE,
)
"""What tokens of well-known services look like, a user and password in an address, and a plug-in's option of such a
name."""


def refuse_secrets(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Raises: UserError naming the option, not the secret."""
    known = {value for name, value in environment.items() if NAMED.search(name) and len(value) >= SHORTEST}
    for path, text in _texts(options, ""):
        if LOOKS.search(text) or any(secret in text for secret in known):
            raise UserError(
                f"--{path.replace('_', '-')}: holds what looks like a token or a password, and options are written to "
                "config.yaml and manifest.json; put it into an environment variable"
            )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in nested options, with its dotted name."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, path)
