"""`--help`: the options that most runs need, in groups; `--help-all`: every option. Torch-free."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from pydantic.fields import FieldInfo

from rlhf.config.record import Config, choices, options

Groups = Mapping[str, Sequence[str]]
"""options in the spelling of the command line, by the title of their group"""
STAGE_GROUPS: Groups = {
    "data": ("data-path", "data-split", "chat-template", "max-train-rows", "max-prompt-length", "max-length"),
    "the run": ("output-dir", "seed", "overwrite", "report-to", "rehearse"),
    "machine": ("deployment-type", "dtype", "zero-stage", "micro-batch-size", "adapter", "plan"),
}
"""options of every stage"""
WIDTH, INDENT = 100, 28


def short_help(cls: type[Config], prog: str, description: str, groups: Groups) -> str:
    """The options of `groups` that `cls` has, each with its description and default."""
    return (
        f"{_page(cls, prog, description, groups)}\n\n--help-all lists every option, --print-config prints the resolved "
        "options\n(with --changed only those that differ from the defaults)"
    )


def full_help(cls: type[Config], prog: str, description: str) -> str:
    """Every option, those of a section together."""
    groups: dict[str, list[str]] = {}
    for name, _ in options(cls):
        section = name.rpartition(".")[0]
        text = cls.model_fields[section].description if section in cls.model_fields else section
        groups.setdefault(text or "options", []).append(name.replace("_", "-"))
    return _page(cls, prog, description, groups)


def _page(cls: type[Config], prog: str, description: str, groups: Groups) -> str:
    fields = {name.replace("_", "-"): field for name, field in options(cls)}
    positional = "".join(f" {name.upper()}" for name in cls.POSITIONAL)
    page = argparse.ArgumentParser(
        usage=f"{prog}{positional} [--config FILE ...] [--OPTION VALUE ...]", description=description, add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=INDENT, width=WIDTH),
    )  # fmt: skip
    for title, names in groups.items():
        group = page.add_argument_group(" ".join(title.split()))
        for name in filter(fields.__contains__, names):
            group.add_argument(f"--{name}", action="store_true", help=_help(fields[name]).replace("%", "%%"))
    return page.format_help().rstrip()


def _help(field: FieldInfo) -> str:
    """What an option does, its choices and its default."""
    text = " ".join((field.description or "").split())
    value = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    notes = [", ".join(map(str, choices(field.annotation)))]
    notes += [] if value is None or value == "" or value is False else [f"default: {value}"]
    note = "; ".join(filter(None, notes))
    return text + (f" ({note})" if note else "")
