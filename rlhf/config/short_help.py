"""A short `--help`: the options that most runs need, in groups. `--help-all` has all of them. Torch-free."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from rlhf.config import Config, option_names

Groups = Mapping[str, Sequence[str]]
"""options as the command line spells them, by the title of their group"""
OF_STAGES: Groups = {
    "data": ("data-path", "data-split", "chat-template", "max-train-rows", "max-prompt-length", "max-length"),
    "the run": ("output-dir", "seed", "overwrite", "report-to", "save-minutes", "export-every"),
    "machine": ("dtype", "zero-stage", "gradient-checkpointing", "micro-batch-size", "adapter"),
}
"""what every stage has"""
WIDTH, INDENT = 100, 28


def short_help(cls: type[Config], prog: str, description: str, groups: Groups) -> str:
    """Every option of `groups` that `cls` has, with its meaning and its default."""
    known = {*option_names(cls)}
    lines = [f"usage: {prog} [--config FILE ...] [--OPTION VALUE ...]", "", textwrap.fill(description, WIDTH)]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in filter(known.__contains__, names):
            lines += _option(name, _field(cls, name))
    more = "--help-all lists every option, --print-config what files and options come to"
    return "\n".join([*lines, "", more, "(with --changed what differs from the defaults)"])


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
