"""A short `--help`: the options that most runs need, in groups. `--help-all` lists all options. Torch-free."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from rlhf.config import Config, option_names

Groups = Mapping[str, Sequence[str]]
"""options in the spelling of the command line, by the title of their group"""
STAGE_GROUPS: Groups = {
    "data": ("data-path", "data-split", "chat-template", "max-train-rows", "max-prompt-length", "max-length"),
    "the run": ("output-dir", "seed", "overwrite", "report-to", "save-minutes", "export-every"),
    "machine": ("dtype", "zero-stage", "gradient-checkpointing", "micro-batch-size", "adapter"),
}
"""options of every stage"""
WIDTH, INDENT = 100, 28


def short_help(cls: type[Config], prog: str, description: str, groups: Groups) -> str:
    """The options of `groups` that `cls` has, each with its description and default."""
    options = {*option_names(cls)}
    lines = [f"usage: {prog} [--config FILE ...] [--OPTION VALUE ...]", "", textwrap.fill(description, WIDTH)]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in filter(options.__contains__, names):
            lines += _option(name, _field(cls, name))
    notes = "--help-all lists every option, --print-config prints the resolved options"
    return "\n".join([*lines, "", notes, "(with --changed only those that differ from the defaults)"])


def _field(cls: type[Config], name: str) -> FieldInfo:
    *sections, last = name.replace("-", "_").split(".")
    section_config: Any = cls
    for section in sections:
        section_config = section_config.model_fields[section].annotation
    field: FieldInfo = section_config.model_fields[last]
    return field


def _option(name: str, field: FieldInfo) -> list[str]:
    text = " ".join((field.description or "").split())
    value = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    default = "" if value is None or value == "" or value is False else f" (default: {value})"
    option = f"  --{name} "
    wrapped = textwrap.wrap(text + default, WIDTH - INDENT)
    if len(option) > INDENT:
        return [option.rstrip(), *(" " * INDENT + line for line in wrapped)]
    return [option.ljust(INDENT) + wrapped[0], *(" " * INDENT + line for line in wrapped[1:])]
