"""A short `--help`: the options that most runs need, in groups. `--help-all` has all of them. Torch-free."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from rlhf.config import Config

Groups = Mapping[str, Sequence[str]]
"""options as the command line spells them, by the title of their group"""
WIDTH, INDENT = 100, 28


def short_help(cls: type[Config], prog: str, description: str, groups: Groups) -> str:
    """Every option of `groups` with its meaning and its default."""
    lines = [f"usage: {prog} [--config FILE ...] [--OPTION VALUE ...]", "", textwrap.fill(description, WIDTH)]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _option(name, _field(cls, name))
    return "\n".join([*lines, "", "--help-all lists every option, --print-config what files and options come to"])


def _field(cls: type[Config], name: str) -> FieldInfo:
    *sections, last = name.replace("-", "_").split(".")
    found: Any = cls
    for section in sections:
        found = found.model_fields[section].annotation
    field: FieldInfo = found.model_fields[last]
    return field


def _option(name: str, field: FieldInfo) -> list[str]:
    text = " ".join((field.description or "").split())
    value = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    default = "" if value is None or value == "" or value is False else f" (default: {value})"
    first = f"  --{name} "
    wrapped = textwrap.wrap(text + default, WIDTH - INDENT)
    if len(first) > INDENT:
        return [first.rstrip(), *(" " * INDENT + line for line in wrapped)]
    return [first.ljust(INDENT) + wrapped[0], *(" " * INDENT + line for line in wrapped[1:])]
