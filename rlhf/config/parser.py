"""Typed, frozen configuration: YAML files compose left to right, then the command line.

Importing this module must not import torch, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import tyro
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf.config import foreign_options
from rlhf.config.secrets import refuse_secrets
from rlhf.errors import UserError
from rlhf.shipped import config_file


class Config(BaseModel):
    """Base of every configuration: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
    FREE: ClassVar[frozenset[str]] = frozenset()
    """its options that change memory, speed or what is shown, but no result: a run goes on with another value"""
    TOTALS: ClassVar[frozenset[str]] = frozenset()
    """its options that say how long a stage is: a run goes on, and says so, and a finished one may be extended"""
    NOTED: ClassVar[frozenset[str]] = frozenset()
    """its other options with which an interrupted run goes on and says so"""

    @classmethod
    def declared(cls, kind: Literal["FREE", "TOTALS", "NOTED"]) -> frozenset[str]:
        """The options of that kind, those of the classes it is made from included."""
        return frozenset().union(*(vars(base).get(kind, ()) for base in cls.__mro__))


C = TypeVar("C", bound=Config)


def suggest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""


def suggest_options(name: str, known: Sequence[str]) -> str:
    """` (did you mean '--sft.learning-rate' or '--ppo.learning-rate'?)`: options whose last part is the same, has these
    initials, or contains it; else the nearest. Those of the same section come alone."""
    section, dot, last = name.rpartition(".")
    rules: tuple[Callable[[str], bool], ...] = (
        lambda option: option == last,
        lambda option: "".join(word[0] for word in option.split("-") if word) == last,
        lambda option: last in option.split("-") or f"{last}s" in option.split("-"),
    )
    own = [option for option in known if option.rpartition(".")[0] == section] if dot else []
    for options in filter(None, (own, known)):
        for rule in rules:
            near = [f"'--{option}'" for option in options if rule(option.rpartition(".")[2])]
            if near:
                listed = sorted(near, key=lambda option: option.count("."))[:4]
                return f" (did you mean {' or '.join(listed)}?)"
    return suggest(name, known).replace("'", "'--", 1)


def validate(cls: type[C], values: dict[str, Any], where: str) -> C:
    """Build `cls` from plain values; every mistake names `where`, its path and the nearest right name."""
    mistakes = _mistakes(cls, values)
    if mistakes:
        raise UserError(f"{where}: " + "; ".join(mistakes))
    return cls.model_validate(values)


def _mistakes(cls: type[Config], values: dict[str, Any]) -> list[str]:
    """What is wrong with plain values, a line each."""
    try:
        cls.model_validate(values)
    except ValidationError as error:
        return [_one_line(cls, e) for e in error.errors()]
    return []


def _one_line(cls: type[Config], error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = sorted(_config_at(cls, path[:-1]).model_fields)
        return f"no option '{'.'.join(path)}'{suggest(path[-1], known)}; have {', '.join(known) or 'none'}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] != "value_error" or not isinstance(error["input"], dict | Config):  # a check of several options
        message += f", got {_short(error['input'])}"
    return f"{'.'.join(path)}: {message}" if path else message


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _config_at(cls: type[Config], path: Sequence[str]) -> type[Config]:
    for name in path:
        field = cls.model_fields.get(name)  # None for a position in a list, or a branch of a union
        cls = (_config_in(field.annotation) if field else None) or cls
    return cls


def _config_in(annotation: Any) -> type[Config] | None:
    """The Config that an annotation is or holds: of `Inner`, `Inner | None`, `tuple[Inner, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next(filter(None, map(_config_in, get_args(annotation))), None)


def option_names(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Every option as the command line spells it: `ppo.kl-coef`."""
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            yield from option_names(kind, f"{prefix}{name}.")
        else:
            yield (prefix + name).replace("_", "-")


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mappings key by key, everything else replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


MOST_VALUES = 100_000
"""of one YAML file, with every alias written out"""


class _Loader(yaml.SafeLoader):
    """Plain values only, and a key that comes twice is a mistake instead of silently the last one."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            problem = f"with its aliases written out it has more than {MOST_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' comes twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _values(node: Any, counts: dict[int, float]) -> float:
    """How many values a node is with every alias written out; infinitely many for one that holds itself."""
    if id(node) not in counts:
        counts[id(node)] = float("inf")
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = itertools.chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
        counts[id(node)] = 1 + sum(_values(child, counts) for child in flat)
    return counts[id(node)]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """One YAML mapping. Keys may be written with hyphens.

    Raises: UserError with the path, and the line of a syntax mistake.
    """
    try:
        values = yaml.load(config_file(path).read_text(encoding="utf-8"), _Loader) or {}
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); expected a YAML file") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8, the 13th month
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: got a {type(values).__name__}, expected a mapping of options")
    return _underscored(values)


def _underscored(values: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key).replace("-", "_"): _underscored(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def compose(cls: type[C], files: Sequence[str | Path]) -> C:
    """The config that the YAML files make, left to right, over the defaults of `cls`.

    What one file gives and a later one mends is no mistake; one that is left names the file that brought it.
    """
    values: dict[str, Any] = {}
    made: list[tuple[str | Path, dict[str, Any]]] = []
    for path in files:
        values = merge(values, read_yaml(path))
        made.append((path, values))
    left = _mistakes(cls, values)
    for path, so_far in made if left else ():
        brought = [mistake for mistake in _mistakes(cls, so_far) if mistake in left]
        if brought:
            raise UserError(f"{path}: " + "; ".join(brought))
    return validate(cls, values, cls.__name__)


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--config A B ...` out of the command line: (files, the rest).

    Raises: UserError when no file follows, or a word is no UTF-8, in which options are written to files.
    """
    for word in argv:
        if not _is_utf8(word):
            raise UserError(f"{word!a}: got bytes that are no UTF-8, expected an option or a path in UTF-8")
    files: list[str] = []
    rest: list[str] = []
    taking = False
    for i, word in enumerate(argv):
        if word == "--config" or word.startswith("--config="):
            taking = word == "--config"
            files += [] if taking else [word.removeprefix("--config=")]
            if taking and (i + 1 == len(argv) or argv[i + 1].startswith("-")):
                raise UserError("--config: got no file, expected one or more YAML files after it")
        elif taking and not word.startswith("-"):
            files.append(word)
        else:
            taking = False
            rest.append(word)
    return files, rest


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def peek(argv: Sequence[str], option: str, default: str) -> str:
    """The value that `--config` files and the command line give one option, before the rest is parsed.

    `option` is written as on the command line: `ppo.algorithm`, `output-dir`.
    """
    files, rest = split_config_files(argv)
    value: Any = default
    for path in files:
        values: Any = read_yaml(path)
        for key in option.replace("-", "_").split("."):
            values = values.get(key) if isinstance(values, dict) else None
        value = value if values is None else values
    for word, following in itertools.zip_longest(rest, rest[1:]):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == f"--{option}":
            value = attached if equals else following or value
    return str(value)


SHOWN = {"--print-config", "--changed"}


def parse(cls: type[C], argv: Sequence[str], prog: str, description: str) -> C:
    """The config of one program: `--config` files, then the options of the command line over them.

    `--print-config` prints the resolved tree, with `--changed` what is no default, and ends the program.
    """
    files, rest = split_config_files(argv)
    default = compose(cls, files)
    show = SHOWN & {*rest} if "--print-config" in rest else set()
    rest = ["--help" if word == "--help-all" else word for word in rest if word not in show]
    _refuse_unknown(cls, rest)
    config = _run_tyro(cls, default, rest, prog, description)
    refuse_secrets(config.model_dump(mode="json"))
    if show:
        print(tree_to_yaml(changed(config, cls())) if "--changed" in show else to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _refuse_unknown(cls: type[Config], argv: Sequence[str]) -> None:
    known = list(option_names(cls))
    for word in argv:
        if not word.startswith("--") or word in ("--help", "--"):
            continue
        name = word[2:].split("=")[0].replace("_", "-")
        positive = re.sub(r"(^|\.)no-", r"\1", name)
        if name not in known and positive not in known:
            cure = foreign_options.answer(name, known) or suggest_options(name, known)
            raise UserError(f"no option '--{name}'{cure}; see --help")


def _run_tyro(cls: type[C], default: C, argv: Sequence[str], prog: str, description: str) -> C:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, prog=prog, description=description, default=default, args=list(argv))
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise UserError(_of_pydantic(leaving) or _unbox(said.getvalue())) from None


def _of_pydantic(leaving: SystemExit) -> str:
    """What pydantic found wrong with the command line's values, or an empty string if it was not pydantic."""
    cause = leaving.__context__
    # tyro wraps a mistake in a section, not one at the top
    mistake = cause if cause is None or isinstance(cause, ValidationError) else cause.__context__
    if not isinstance(mistake, ValidationError):
        return ""
    section = getattr(cause, "arg", "")  # the dotted path of the section
    start = [section] if isinstance(section, str) and section else []
    said = []
    for error in mistake.errors():
        option = ".".join([*start, *map(str, error["loc"])]).replace("_", "-")
        said.append(_one_line(Config, {**error, "loc": ["--" + option] if option else []}))
    return "; ".join(said) + "; see --help"


def _unbox(text: str) -> str:
    """The first paragraph of tyro's boxed message, as one line."""
    lines = (line.strip("│╭╮╰╯ ") for line in text.splitlines()[1:])
    return " ".join(itertools.takewhile(lambda words: words.strip("─"), lines)) + "; see --help"


def to_yaml(config: Config) -> str:
    """The whole resolved tree; `--config` reads it back."""
    return tree_to_yaml(config.model_dump(mode="json"))


def tree_to_yaml(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def changed(config: Config, default: Config) -> dict[str, Any]:
    """What differs from `default`; `--config` reads it back as the whole."""
    return _difference(config.model_dump(mode="json"), default.model_dump(mode="json"))


def _difference(tree: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        both = isinstance(value, dict) and isinstance(default.get(name), dict)
        own = _difference(value, default[name]) if both else value
        if own != ({} if both else default.get(name)):
            found[name] = own
    return found
