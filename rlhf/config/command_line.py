"""The words of a command line as plain values, which pydantic converts and checks. Torch-free."""

from collections.abc import Container, Iterator, Sequence
from types import NoneType
from typing import get_args, get_origin

from rlhf.config import foreign_options
from rlhf.config.mistakes import suggest_options
from rlhf.config.record import Config, choices, option_names, options
from rlhf.config.yaml_files import EXPONENT
from rlhf.errors import UserError

NO_VALUE = ("None", "none", "null")
"""words for an option that is not set, where it may be unset"""
BOOLEANS = ("true", "false")
"""words that may follow a flag, as the programs of transformers have it"""


def values(cls: type[Config], words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """(dotted name, text or list of texts) of each option among the words.

    `--name VALUE`, `--name=VALUE`, `--flag`, `--flag true`, `--no-flag`, and `--list VALUE VALUE` up to the next
    option. The last of two wins. Words before the first option, or after the value of one that takes a single value,
    are those of `cls.POSITIONAL`.
    Raises: UserError for a value that is missing, else for unknown options, all in one line, or a word too many.
    """
    known, rest, bare = dict(options(cls)), list(words), []
    unknown: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            bare.append(word)
            continue
        typed, equals, value = word[2:].partition("=")
        name = typed.replace("-", "_")
        positive = ".".join([*name.split(".")[:-1], name.split(".")[-1].removeprefix("no_")])
        if name not in known and not (positive in known and _is_flag(known[positive].annotation)):
            unknown.append(typed.replace("_", "-"))
            while rest and not rest[0].startswith("--"):
                del rest[0]
            continue
        if name in known and _is_flag(known[name].annotation) and rest and rest[0].lower() in BOOLEANS and not equals:
            equals, value = "=", rest.pop(0)
        if name not in known or (_is_flag(known[name].annotation) and not equals):
            yield positive, name in known
            continue
        kind = known[name].annotation
        several = _takes_several(kind)
        texts = [value] if equals else []
        while rest and not rest[0].startswith("--") and not equals and (several or not texts):
            texts.append(rest.pop(0))
        if not texts and not several:
            raise UserError(f"--{typed}: got no value, expected one after it; see --help")
        if several and choices(kind):  # 1,2 as 1 2
            texts = [part for text in texts for part in text.split(",")]
        yield name, [_plain(one, kind) for one in texts] if several and texts != ["None"] else _plain(texts[0], kind)
    if unknown:
        raise UserError("; ".join(_no_option(name, [*option_names(cls)]) for name in unknown) + "; see --help")
    yield from _positional(cls, bare)


def without(words: Sequence[str], names: Container[str]) -> list[str]:
    """The words of a command line but for these options, by the names of their fields, and what follows each up to the
    next option."""
    rest: list[str] = []
    dropped = False
    for word in words:
        if word.startswith("--"):
            dropped = word[2:].partition("=")[0].replace("-", "_") in names
        rest += [] if dropped else [word]
    return rest


def _no_option(name: str, names: Sequence[str]) -> str:
    return f"no option '--{name}'{foreign_options.answer(name, names) or suggest_options(name, names)}"


def _positional(cls: type[Config], bare: list[str]) -> Iterator[tuple[str, object]]:
    for name in cls.POSITIONAL:
        kind = cls.model_fields[name].annotation
        if bare and _takes_several(kind):
            yield name, bare
            bare = []
        elif bare:
            yield name, bare[0]
            bare = bare[1:]
    if bare:
        raise UserError(f"got '{bare[0]}', expected an option such as --name before each value; see --help")


def _is_flag(kind: object) -> bool:
    return kind is bool or bool in get_args(kind)


def _takes_several(kind: object) -> bool:
    return any(get_origin(part) in (tuple, list) for part in (kind, *get_args(kind)))


def _plain(word: str, kind: object) -> object:
    """A word as a YAML file would have it where pydantic does not convert text: nothing, and a number among choices."""
    allowed = choices(kind)
    for choice in allowed:
        if str(choice) == word:
            return choice
    if int in (kind, *get_args(kind)) and EXPONENT.fullmatch(word) and float(word).is_integer():
        return int(float(word))  # 1e4
    return None if word in NO_VALUE and NoneType in get_args(kind) else word
