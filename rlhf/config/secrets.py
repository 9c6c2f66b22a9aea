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
_TOKENS = (
    r"\b(?:hf_[a-z0-9]{20,}|api_org_[a-z0-9]{20,}|sk-[\w-]{20,}|[srp]k_(?:live|test)_[a-z0-9]{16,}|gh[pousr]_[a-z0-9]{30,}"
    r"|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|xapp-\d-[\w-]{10,}|r8_[a-z0-9]{30,}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{20,}|nvapi-[\w-]{20,}|gsk_[a-z0-9]{20,}|xai-[a-z0-9]{20,}|pplx-[a-z0-9]{20,}|tgp_v1_[\w-]{20,}"
    r"|wandb_v\d_\w{20,}|npm_[a-z0-9]{30,}|pypi-AgE[\w-]{30,}|dop_v1_[a-f0-9]{30,}|SG\.[\w-]{15,}\.[\w-]{15,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|A(?:KI|SI)A[a-z0-9]{16}\b)|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""shapes of well-known services, and of a JSON web token and a private key"""
_NAMES = (
    r"(?<![\w-])(?:[a-z]+[_-])?(?:(?:api|access|account|private|secret|auth)[_-]?(?:key|token)|auth|authorization|bearer"
    r"|secret|password|passwd|pwd|credentials?)"
)
"""names of options whose values are secrets"""
SECRET_PATTERNS = re.compile(
    rf"{_TOKENS}|\bBearer\s+\S{{8,}}|://[^/@\s:]+:[^/@\s]+@|(?:{_NAMES}|(?<![\w-])token)=[^\s,&]{{4,}}"
    r"|[?&](?:key|sig|signature|x-(?:amz|goog)-\w+)=[^\s,&]{4,}",
    re.IGNORECASE,
)
"""Tokens, a user name and password or a signature in an address, and options with such a name."""
MASK = "***"


def refuse_secrets(options: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> None:
    """Raises: UserError that names the option, without its value."""
    secrets = _values(environment)
    for name, text in _texts(options, ""):
        if _is_secret(text, secrets) or _is_named(name.rpartition(".")[2], text):
            raise UserError(
                f"--{name.replace('_', '-')}: got what looks like a token or a password, but options are written to "
                "config.yaml and manifest.json; put it into an environment variable"
            )


def masked(value: object, environment: Mapping[str, str] = os.environ) -> Any:
    """Nested options with MASK in place of each text that `refuse_secrets` would refuse: options made in Python were
    not refused."""
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(nested, str) and _is_named(key, nested) else masked(nested, environment)
            for key, nested in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(nested, environment) for nested in value]
    return MASK if isinstance(value, str) and _is_secret(value, _values(environment)) else value


def _values(environment: Mapping[str, str]) -> set[str]:
    return {value for key, value in environment.items() if SECRET_NAMES.search(key) and len(value) >= MIN_LENGTH}


def _is_secret(text: str, secrets: set[str]) -> bool:
    return bool(SECRET_PATTERNS.search(text)) or any(secret in text for secret in secrets)


def _is_named(key: object, text: str) -> bool:
    """Whether an option of a mapping has the name of a secret."""
    return bool(SECRET_PATTERNS.match(f"{key}={text}"))


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
