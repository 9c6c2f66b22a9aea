"""Typed, frozen configuration: YAML files are merged from left to right, then the command line over them.

Importing this module must not import torch, so that `--help` and an error for a mistyped option appear at once.
"""

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import tyro
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rlhf.config import foreign_options
from rlhf.config.secrets import refuse_secrets
from rlhf.config.yaml_files import is_utf8, read_yaml
from rlhf.errors import UserError


class Config(BaseModel):
    """Base of every configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
    FREE: ClassVar[frozenset[str]] = frozenset()
    """options that change memory, speed or output, but no result: a run resumes with another value"""
    TOTALS: ClassVar[frozenset[str]] = frozenset()
    """options for the length of a stage: a run resumes with another value, with a note; a finished one is extended"""
    NOTED: ClassVar[frozenset[str]] = frozenset()
    """other options: an interrupted run resumes with another value, with a note"""

    @model_validator(mode="before")
    @classmethod
    def _one_value_is_a_list(cls, values: Any) -> Any:
        """`data_path: pairs.jsonl` in a file means a list of one path, as on the command line."""
        if not isinstance(values, dict):
            return values
        lists = {name for name, field in cls.model_fields.items() if _is_list(field.annotation)}
        return {n: [v] if n in lists and isinstance(v, str | int | float) else v for n, v in values.items()}

    @classmethod
    def adopt(cls, values: dict[str, Any], source: object) -> dict[str, Any]:
        """The plain values of a file, without those that a section leaves out."""
        adopted = dict(values)
        for name, field in cls.model_fields.items():
            section = field.annotation
            if isinstance(section, type) and issubclass(section, Config) and isinstance(values.get(name), dict):
                adopted[name] = section.adopt(values[name], source)
        return adopted

    @classmethod
    def declared(cls, kind: Literal["FREE", "TOTALS", "NOTED"]) -> frozenset[str]:
        """The options of that kind, of this class and its base classes."""
        return frozenset().union(*(vars(base).get(kind, ()) for base in cls.__mro__))


def _is_list(annotation: Any) -> bool:
    """Whether an option takes any number of values: `tuple[str, ...]`, or that or None."""
    kinds = {*get_args(annotation)} - {type(None)} if type(None) in get_args(annotation) else {annotation}
    return all(get_origin(kind) is tuple and get_args(kind)[1:] == (...,) for kind in kinds)


C = TypeVar("C", bound=Config)


def suggest(name: str, names: Sequence[str], cutoff: float = 0.5) -> str:
    """` (did you mean 'x'?)` for the most similar known name, or an empty string."""
    similar = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


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
            similar = [f"'--{option}'" for option in options if rule(option.rpartition(".")[2])]
            if similar:
                listed = sorted(similar, key=lambda option: option.count("."))[:4]
                return f" (did you mean {' or '.join(listed)}?)"
    return suggest(name, names).replace("'", "'--", 1)


def validate(cls: type[C], values: dict[str, Any], source: str) -> C:
    """Build `cls` from plain values. Raises: UserError with `source`, and the path and cure of every mistake."""
    mistakes = _mistakes(cls, values)
    if mistakes:
        raise UserError(f"{source}: " + "; ".join(mistakes))
    return cls.model_validate(values)


def refused(cls: type[Config], values: dict[str, Any]) -> set[str]:
    """The options among plain values that `cls` does not have, or whose value it refuses."""
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return {str(e["loc"][0]) for e in error.errors() if e["loc"]}
    return set()


Cure = Callable[[type["Config"], list[str]], str]
"""(config, path of an unknown key) -> what follows `no option 'key'` in the message"""


def _similar_key(cls: type[Config], path: list[str]) -> str:
    names = sorted(_config_at(cls, path[:-1]).model_fields)
    have = f"; have {', '.join(names) or 'none'}"
    options = (option.replace("-", "_") for option in option_names(cls))
    same = sorted((o for o in options if o.rpartition(".")[2] == path[-1]), key=lambda option: option.count("."))
    elsewhere = " or ".join(f"'{option}'" for option in same[:4])
    return f" (did you mean {elsewhere}?){have}" if same else f"{suggest(path[-1], names)}{have}"


def _foreign_or_similar_key(cls: type[Config], path: list[str]) -> str:
    """For a key of a program's config file: as on its command line, if the key is an option of another project."""
    return foreign_options.answer(".".join(path).replace("_", "-"), [*option_names(cls)]) or _similar_key(cls, path)


def _mistakes(cls: type[Config], values: dict[str, Any], cure: Cure = _similar_key) -> list[str]:
    """The mistakes in plain values, one line each."""
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return [_one_line(cls, e, cure) for e in error.errors()]
    return []


def _one_line(cls: type[Config], error: Any, cure: Cure = _similar_key) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return f"no option '{'.'.join(path)}'{cure(cls, path)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] != "value_error" or not isinstance(error["input"], dict | Config):  # an error of several options
        message += f", got {_short(error['input'])}"
    if error["type"] == "literal_error":
        message += _suggest_choice(str(error["input"]), error["ctx"]["expected"])
    return f"{'.'.join(path)}: {message}" if path else message


def _suggest_choice(value: str, expected: str) -> str:
    """` (did you mean 'single_node'?)` for `single-node`; expected: the choices, in quotes"""
    return suggest(foreign_options.plain(value), re.findall(r"'([^']*)'", expected))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _config_at(cls: type[Config], path: Sequence[str]) -> type[Config]:
    for name in path:
        field = cls.model_fields.get(name)  # None for a position in a list, or a branch of a union
        cls = (_config_in(field.annotation) if field else None) or cls
    return cls


def _config_in(annotation: Any) -> type[Config] | None:
    """The Config class in an annotation: `Inner` for `Inner`, `Inner | None` and `tuple[Inner, ...]`; else None."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next(filter(None, map(_config_in, get_args(annotation))), None)


def option_names(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every option in the spelling of the command line: `ppo.kl-coef`."""
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            yield from option_names(kind, f"{prefix}{name}.")
        else:
            yield (prefix + name).replace("_", "-")


def merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `override`: mappings are merged key by key, other values replaced."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


PRINT_OPTIONS = {"--print-config", "--changed"}


class Overlay(NamedTuple):
    """Options of another program's file, laid over the first `over` YAML files and under the others."""

    values: dict[str, Any]
    source: str = ""
    over: int = 0


NO_OVERLAY = Overlay({})


def trees(files: Sequence[str | Path], overlay: Overlay = NO_OVERLAY) -> list[tuple[str | Path, dict[str, Any]]]:
    """(source, options) of each file and of the overlay, in the order in which they are merged."""
    read: list[tuple[str | Path, dict[str, Any]]] = [(path, read_yaml(path)) for path in files]
    return [*read[: overlay.over], (overlay.source, overlay.values), *read[overlay.over :]] if overlay.values else read


def compose(cls: type[C], files: Sequence[str | Path], overlay: Overlay = NO_OVERLAY) -> C:
    """The config of the YAML files, merged from left to right over the defaults of `cls`.

    A mistake in one file that a later file corrects is no error. Another mistake is reported with its file.
    """
    values: dict[str, Any] = {}
    composed: list[tuple[str | Path, dict[str, Any]]] = []
    for path, tree in trees(files, overlay):
        values = cls.adopt(merge(values, tree), path)
        composed.append((path, values))
    mistakes = _mistakes(cls, values, _foreign_or_similar_key)
    for path, values_so_far in composed if mistakes else ():
        mistakes_so_far = _mistakes(cls, values_so_far, _foreign_or_similar_key)
        own_mistakes = [mistake for mistake in mistakes_so_far if mistake in mistakes]
        if own_mistakes:
            raise UserError(f"{path}: " + "; ".join(own_mistakes))
    return validate(cls, values, cls.__name__)


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files after `--config`, the other words) of a command line.

    Raises: UserError if no file follows, or a word is not valid UTF-8, in which options are written to files.
    """
    for word in argv:
        if not is_utf8(word):
            raise UserError(f"{word!a}: got bytes that are not UTF-8, expected an option or a path in UTF-8")
    files: list[str] = []
    arguments: list[str] = []
    in_files = False
    for i, word in enumerate(argv):
        if word == "--config" or word.startswith("--config="):
            in_files = word == "--config"
            files += [] if in_files else [word.removeprefix("--config=")]
            if in_files and (i + 1 == len(argv) or argv[i + 1].startswith("-")):
                raise UserError("--config: got no file, expected one or more YAML files after it")
        elif in_files and not word.startswith("-"):
            files.append(word)
        else:
            in_files = False
            arguments.append(word)
    return files, arguments


def peek(argv: Sequence[str], option: str, default: str) -> str:
    """The value of one option from `--config` files and the command line, before the other options are parsed.

    option: in the spelling of the command line, `ppo.algorithm` or `output-dir`
    """
    files, arguments = split_config_files(argv)
    value: Any = default
    for path in files:
        values: Any = read_yaml(path)
        for key in option.replace("-", "_").split("."):
            values = values.get(key) if isinstance(values, dict) else None
        value = value if values is None else values
    for word, next_word in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == f"--{option}":
            value = attached if equals else next_word or value
    return str(value)


def parse(
    cls: type[C],
    argv: Sequence[str],
    prog: str,
    description: str,
    overlay: Overlay = NO_OVERLAY,
    complete: Callable[[C], C] = lambda config: config,
) -> C:
    """The config of one program: `--config` files, then the options of the command line over them; then `complete`.

    `--print-config` prints the resolved options, with `--changed` only those that differ from the defaults, and exits.
    """
    files, arguments = split_config_files(argv)
    default = compose(cls, files, overlay)
    printed = PRINT_OPTIONS & {*arguments} if "--print-config" in arguments else set()
    arguments = ["--help" if word == "--help-all" else word for word in arguments if word not in printed]
    _refuse_unknown(cls, arguments)
    config = complete(_run_tyro(cls, default, arguments, prog, description))
    refuse_secrets(config.model_dump(mode="json"))
    if printed:
        print(tree_to_yaml(changed(config, cls())) if "--changed" in printed else to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _refuse_unknown(cls: type[Config], argv: Sequence[str]) -> None:
    names = list(option_names(cls))
    for word in argv:
        if not word.startswith("--") or word in ("--help", "--"):
            continue
        name = word[2:].split("=")[0].replace("_", "-")
        positive = re.sub(r"(^|\.)no-", r"\1", name)
        if name not in names and positive not in names:
            cure = foreign_options.answer(name, names) or suggest_options(name, names)
            raise UserError(f"no option '--{name}'{cure}; see --help")


def _run_tyro(cls: type[C], default: C, argv: Sequence[str], prog: str, description: str) -> C:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(cls, prog=prog, description=description, default=default, args=list(argv))
    except SystemExit as exit_error:
        if exit_error.code in (0, None):
            raise
        raise UserError(_pydantic_mistakes(exit_error) or _unboxed_line(stderr.getvalue())) from None


def _pydantic_mistakes(exit_error: SystemExit) -> str:
    """The mistakes that pydantic reports for the command line, or an empty string if the error is not from pydantic."""
    cause = exit_error.__context__
    # tyro wraps the error of a section, but not that of a top-level option
    mistake = cause if cause is None or isinstance(cause, ValidationError) else cause.__context__
    if not isinstance(mistake, ValidationError):
        return ""
    section = getattr(cause, "arg", "")  # the dotted path of the section
    start = [section] if isinstance(section, str) and section else []
    lines = []
    for error in mistake.errors():
        option = ".".join([*start, *map(str, error["loc"])]).replace("_", "-")
        lines.append(_one_line(Config, {**error, "loc": ["--" + option] if option else []}))
    return "; ".join(lines) + "; see --help"


def _unboxed_line(text: str) -> str:
    """The first paragraph of tyro's message, as one line, with sorted choices. It is in a box, or between two rules of
    hyphens where the output cannot have boxes."""
    lines = [line.strip("│╭╮╰╯| ") for line in text.splitlines()[1:]]
    after_rule = itertools.dropwhile(lambda words: not words.strip("─-+"), lines)
    message = " ".join(itertools.takewhile(lambda words: words.strip("─-+"), after_rule))
    message = re.sub(r"(?<=one of )\(('.*')\)", lambda match: ", ".join(sorted(match[1].split(", "))), message)
    wrong = re.search(r"invalid choice '([^']*)'.* one of (.*)", message)
    if wrong is None:
        return f"{message}; see --help"
    nearest = _suggest_choice(wrong[1], wrong[2])
    return f"{message}{'; several values are separated by spaces' if ',' in wrong[1] else nearest}; see --help"


def to_yaml(config: Config) -> str:
    """All resolved options; `--config` reads them back."""
    return tree_to_yaml(config.model_dump(mode="json"))


def tree_to_yaml(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def changed(config: Config, default: Config) -> dict[str, Any]:
    """The options that differ from `default`; `--config` reads them back to the same config."""
    return _difference(config.model_dump(mode="json"), default.model_dump(mode="json"))


def _difference(tree: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    difference = {}
    for name, value in tree.items():
        both = isinstance(value, dict) and isinstance(default.get(name), dict)
        own_value = _difference(value, default[name]) if both else value
        if own_value != ({} if both else default.get(name)):
            difference[name] = own_value
    return difference
