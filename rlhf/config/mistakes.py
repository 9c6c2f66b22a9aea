"""Mistakes in options, one line each: where, what, got, expected, cure. Torch-free."""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from rlhf.config import foreign_options
from rlhf.config.record import Config, Tree, option_names, record_in
from rlhf.errors import UserError

C = TypeVar("C", bound=Config)
LISTED = 40
"""known names, at most, that a message lists"""


class Mistake(NamedTuple):
    """Where it is and what is expected there; an unknown key is named in the text."""

    path: tuple[str, ...]
    text: str

    def in_file(self) -> str:
        return ": ".join(filter(None, (".".join(self.path), self.text)))

    def on_command_line(self) -> str:
        option = ".".join(part for part in self.path if not part.isdigit()).replace("_", "-")
        return f"--{option}: {self.text}" if option else self.text


Cure = Callable[[type[Config], list[str]], str]
"""(config, path of an unknown key) -> what follows `no option 'key'` in the message"""


def nearest(name: str, names: Sequence[str], cutoff: float = 0.66) -> str | None:
    """The most similar known name, in any case; None if none is near."""
    known = {known.lower(): known for known in reversed(names)}
    similar = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return known[similar[0]] if similar else None


def suggest(name: str, names: Sequence[str], cutoff: float = 0.66) -> str:
    """` (did you mean 'x'?)` for the most similar known name, or an empty string."""
    similar = nearest(name, names, cutoff)
    return f" (did you mean '{similar}'?)" if similar else ""


def suggest_options(name: str, names: Sequence[str]) -> str:
    """` (did you mean '--sft.learning-rate' or '--ppo.learning-rate'?)`: options whose last part is equal to the
    name, has it as initials, or contains it; else the most similar one. Options of the same section are preferred."""
    section, dot, last = name.rpartition(".")
    rules: tuple[Callable[[str], bool], ...] = (
        lambda option: option == last,
        lambda option: "".join(word[0] for word in option.split("-") if word) == last,
        lambda option: last in option.split("-") or f"{last}s" in option.split("-"),
    )
    in_section = [option for option in names if option.rpartition(".")[0] == section] if dot else []
    for options in filter(None, (in_section, names)):
        for rule in rules:
            if similar := [option for option in options if rule(option.rpartition(".")[2])]:
                return _did_you_mean(similar)
    for options in filter(None, (in_section, names)):
        names_alone = dict.fromkeys(option.rpartition(".")[2] for option in options)
        if (similar_name := nearest(last, list(names_alone))) is not None:  # sections alone are no likeness
            return _did_you_mean([option for option in options if option.rpartition(".")[2] == similar_name])
    return ""


def _did_you_mean(options: Sequence[str]) -> str:
    """The options of the fewest sections first."""
    listed = [f"'--{option}'" for option in sorted(options, key=lambda option: option.count("."))[:4]]
    return f" (did you mean {' or '.join(listed)}?)"


def validate(cls: type[C], values: Tree, source: str) -> C:
    """Build `cls` from plain values. Raises: UserError with `source`, and the path and cure of every mistake."""
    mistakes = mistakes_in(cls, values)
    if mistakes:
        raise UserError(f"{source}: " + "; ".join(mistake.in_file() for mistake in mistakes))
    return cls.model_validate(values)


def refused(cls: type[Config], values: Tree) -> set[str]:
    """The options among plain values that `cls` does not have, or whose value it refuses."""
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return {str(e["loc"][0]) for e in error.errors() if e["loc"]}
    return set()


def similar_key(cls: type[Config], path: list[str]) -> str:
    """The cure for an unknown key of a plug-in."""
    names = sorted(_record_at(cls, path[:-1]).model_fields)
    have = f"; have {', '.join(names) or 'none'}" if len(names) <= LISTED else "; see --help"
    options = (option.replace("-", "_") for option in option_names(cls))
    same = sorted((o for o in options if o.rpartition(".")[2] == path[-1]), key=lambda option: option.count("."))
    elsewhere = " or ".join(f"'{option}'" for option in same[:4])
    return f" (did you mean {elsewhere}?){have}" if same else f"{suggest(path[-1], names)}{have}"


def foreign_or_similar_key(cls: type[Config], path: list[str]) -> str:
    """For a key of a program's config file: as on its command line, if the key is an option of another project."""
    return foreign_options.answer(".".join(path).replace("_", "-"), [*option_names(cls)]) or similar_key(cls, path)


def mistakes_in(cls: type[Config], values: Tree, cure: Cure = similar_key) -> list[Mistake]:
    """The mistakes in plain values."""
    try:
        cls.model_validate(values)
    except ValidationError as error:
        errors = error.errors()
        lists = {e["loc"][:-1] for e in errors}  # without its mistaken members a list may be too short
        return [_mistake(cls, e, cure) for e in errors if e["type"] != "too_short" or e["loc"] not in lists]
    return []


def _mistake(cls: type[Config], error: Any, cure: Cure) -> Mistake:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        if isinstance(error["input"], dict) and len(path) == 1:
            sections = [name for name, field in cls.model_fields.items() if record_in(field.annotation)]
            have = f"; have {', '.join(sections)}" if sections else ""
            whole = "a file with a section for each stage is for train.py"
            return Mistake((), f"no section '{path[0]}'{suggest(path[0], sections)}{have}; {whole}")
        return Mistake((), f"no option '{'.'.join(path)}'{cure(cls, path)}")
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type" and error["input"] is None:
        text = "expected one or more values, or [] for none"
    if error["type"] != "value_error" or not isinstance(error["input"], dict | Config):  # an error of several options
        text += f", got {_short(error['input'])}"
    if error["type"] == "literal_error":
        text += suggest(foreign_options.plain(str(error["input"])), re.findall("'([^']*)'", error["ctx"]["expected"]))
    return Mistake(tuple(path), text)


def _short(value: object) -> str:
    """A value as Python writes it; a number of the command line, which is text, as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?([\d.]+(e[+-]?\d+)?|nan|inf)", value)
    text = str(value) if is_number else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _record_at(cls: type[Config], path: Sequence[str]) -> type[Config]:
    for name in path:
        field = cls.model_fields.get(name)  # None for a position in a list, or a branch of a union
        cls = (record_in(field.annotation) if field else None) or cls
    return cls
