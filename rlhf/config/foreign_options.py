"""Options of DeepSpeed-Chat, TRL, transformers, OpenRLHF and LLaMA-Factory, and earlier ones of this project, with
their names here: those that people type. foreign_options.txt has them. Torch-free."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PREFIX_TUNING = (
    "--adapter p_tuning: packed rows cannot hold the keys and values of prefix tuning; --adapter prompt_tuning "
    "trains fewer weights"
)
LORA = "--adapter lora: that method gained no more, within the intervals (docs/adapters.md)"
OWN_TRACKER = "a tracker of yours, --report-to my_tracker.py (docs/extending.md)"
METHODS = {
    "qlora": "--adapter lora --quantize nf4: QLoRA is LoRA on weights of 4 bits",
    "dora": "--adapter lora,use_dora=true",
    "rslora": "--adapter lora,use_rslora=true",
    "pissa": LORA,
    "olora": LORA,
    "oft": LORA,
    "miss": LORA,
    "loha": LORA,
    "ln_tuning": "--adapter ia3: it trains as few weights; bitfit trains the biases of a model that has some",
    "bit_fit": "--adapter bitfit",
    "prefix_tuning": PREFIX_TUNING,
    "p_tuning_v2": PREFIX_TUNING,
    "neptune": OWN_TRACKER,
    "visdom": OWN_TRACKER,
}
"""By the name of a method elsewhere, as `plain` writes it: what it is here."""


def plain(name: str) -> str:
    """A name without differences of spelling.

    >>> plain("rs-LoRA")
    'rs_lora'
    """
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _rows() -> Iterator[tuple[str, str, str]]:
    """(name, names here, note) of each name in foreign_options.txt; an option that is gone is `name=default`."""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line and line[0] != "#":
            names, options, note = line.split("|")
            yield from ((name, options.strip(), note.strip()) for name in names.split())


@cache
def foreign() -> Mapping[str, tuple[str, str]]:
    """By the name of an option in another project: its names in this project, of which the first that a program has
    applies (none for what needs no option here), and a note on the difference."""
    return {name.partition("=")[0]: (options, note) for name, options, note in _rows()}


@cache
def gone() -> Mapping[str, Any]:
    """By the name in a file of each option that is gone: its default, with which a run was as one without it now."""
    pairs = (name.partition("=") for name, _, _ in _rows() if "=" in name)
    return {name.replace("-", "_"): json.loads(default) for name, _, default in pairs}


def answer(name: str, available: Sequence[str]) -> str:
    """`: here it is --micro-batch-size; batch sizes ...` for an option name of another project, else an empty
    string. For an option with a section, `sft.lr`, an option of that section is preferred."""
    section, _, last = name.rpartition(".")
    if last not in foreign():
        return ""
    names, note = foreign()[last]
    if not names:
        return f": {note}"
    in_section = [
        option for candidate in names.split() if section and (option := f"{section}.{candidate}") in available
    ]
    options = in_section or next(filter(None, (_same_name(candidate, available) for candidate in names.split())), [])
    first = names.split()[0]
    other_program = f"--{first} of `train`" if "." in first else f"--{first} of another stage"
    suggestion = " or ".join(f"--{option}" for option in options) or other_program
    return f": here it is {suggestion}" + (f"; {note}" if note else "")


def _same_name(candidate: str, available: Sequence[str]) -> list[str]:
    """The known option of this name; else the options of this name in sections."""
    last = candidate.rpartition(".")[2]
    same_name = [option for option in available if option.rpartition(".")[2] == last]
    return next(([name] for name in (candidate, last) if name in same_name), same_name)
