"""Refuses secrets in options, because options are written to files and visible to every user of the machine."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.errors import UserError

SECRET_NAMES = re.compile(
    r"(?:^|_)(?:api)?(?:token|key|secret|password|passwd|credential)s?(?:$|_(?!(?:path|dir|file|name)$))", re.IGNORECASE
)
"""Names of environment variables whose values are secrets: HF_TOKEN, API_KEY_2, but not TOKENIZER_PATH or KEY_DIR."""
MIN_LENGTH = 8
"""minimum number of characters of a secret; shorter values of such variables (`1`, `true`) are settings"""
SECRET_PATTERNS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\bglpat-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\br8_[A-Za-z0-9]{30,}|\bAIza[\w-]{30,}"
    r"|\bBearer\s+\S{8,}|://[^/@\s:]+:[^/@\s]+@|\b(?:api[_-]?key|password|passwd|secret)=[^\s,]{4,}"
    r"|(?<![\w-])(?:access[_-]?)?token=[^\s,&]{4,}|[?&](?:sig|signature|x-(?:amz|goog)-\w+)=[^\s,&]{4,}",
    re.IGNORECASE,
)
"""Tokens of well-known services, a user name and password or a signature in an address, and plug-in options with such a
name."""
MASK = "***"


def refuse_secrets(options: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> None:
    """Raises: UserError that names the option, without its value."""
    secrets = _values(environment)
    for name, text in _texts(options, ""):
        if _is_secret(text, secrets):
            raise UserError(
                f"--{name.replace('_', '-')}: got what looks like a token or a password, but options are written to "
                "config.yaml and manifest.json; put it into an environment variable"
            )


def masked(value: object, environment: Mapping[str, str] = os.environ) -> Any:
    """Nested options with MASK in place of each text that `refuse_secrets` would refuse: options made in Python were
    not refused."""
    if isinstance(value, Mapping):
        return {key: masked(nested, environment) for key, nested in value.items()}
    if isinstance(value, list | tuple):
        return [masked(nested, environment) for nested in value]
    return MASK if isinstance(value, str) and _is_secret(value, _values(environment)) else value


def _values(environment: Mapping[str, str]) -> set[str]:
    return {value for key, value in environment.items() if SECRET_NAMES.search(key) and len(value) >= MIN_LENGTH}


def _is_secret(text: str, secrets: set[str]) -> bool:
    return bool(SECRET_PATTERNS.search(text)) or any(secret in text for secret in secrets)


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every text in nested options."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, nested in value.items():
            yield from _texts(nested, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for nested in value:
            yield from _texts(nested, name)
