"""Options from files and the command line: layers that are merged from left to right, then validated once.

Importing this module must not import torch, so that `--help` and an error for a mistyped option appear at once.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from rlhf.config import command_line
from rlhf.config.mistakes import Mistake, foreign_or_similar_key, mistakes_in
from rlhf.config.record import Config, Tree
from rlhf.config.secrets import refuse_secrets
from rlhf.config.short_help import full_help
from rlhf.config.yaml_files import read_yaml
from rlhf.errors import UserError

C = TypeVar("C", bound=Config)
PRINT_OPTIONS = {"--print-config", "--changed"}
COMMAND_LINE = "command line"
Origins = Mapping[str, str]
"""by dotted name of an option that is set, `ppo.kl_coef`: the file that sets it, or COMMAND_LINE"""


class Layer(NamedTuple):
    """Options from one place, as a tree of plain values."""

    source: str
    tree: Tree


class Overlay(NamedTuple):
    """Options of another program's file, laid over the first `over` YAML files and under the others."""

    values: Tree
    source: str = ""
    over: int = 0


NO_OVERLAY = Overlay({})


def merge(base: Tree, override: Tree) -> Tree:
    """`base` with the values of `override`: mappings are merged key by key, other values replaced."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def leaves(tree: Tree, prefix: str = "") -> Iterable[tuple[str, object]]:
    """(dotted name, value) of each value of a tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def layers(cls: type[Config], argv: Sequence[str], overlay: Overlay = NO_OVERLAY) -> list[Layer]:
    """What files, overlay and command line set, in the order in which they are merged. Raises: UserError."""
    files, words = split_config_files(argv)
    read = [Layer(path, read_yaml(path)) for path in files]
    if overlay.values:
        read.insert(overlay.over, Layer(overlay.source, overlay.values))
    typed: Tree = {}
    for name, value in command_line.values(cls, words):
        *sections, last = name.split(".")
        branch: Tree = {last: value}
        for section in reversed(sections):
            branch = {section: branch}
        typed = merge(typed, branch)
    return [*read, Layer(COMMAND_LINE, typed)]


def origins(layers: Iterable[Layer]) -> Origins:
    """Where each option is set: the last of the layers that have it."""
    return {name: source for source, tree in layers for name, _ in leaves(tree)}


def combine(cls: type[C], layers: Iterable[Layer]) -> C:
    """The record of the merged layers over the defaults of `cls`.

    A mistake in one layer that a later one corrects is no error. Another mistake is reported with the layer in which it
    appears.
    """
    values: Tree = {}
    merged: list[Layer] = []
    for source, tree in layers:
        values = merge(values, tree)
        values = values if source == COMMAND_LINE else cls.adopt(values, source)
        merged.append(Layer(source, values))
    try:
        return cls.model_validate(values)
    except ValidationError:
        raise _first_mistake(cls, merged) from None


def _first_mistake(cls: type[Config], merged: Sequence[Layer]) -> UserError:
    """The mistakes that stay to the end, of the first of the layers, each merged with those before, that has any."""
    lasting = mistakes_in(cls, merged[-1].tree, foreign_or_similar_key)
    for source, tree in merged:
        new = [mistake for mistake in mistakes_in(cls, tree, foreign_or_similar_key) if mistake in lasting]
        # a section has the mistakes of the options that it takes from the top
        lines = [m for m in new if not m.path or Mistake(m.path[1:], m.text) not in new]
        if lines and source == COMMAND_LINE:
            return UserError("; ".join(mistake.on_command_line() for mistake in lines) + "; see --help")
        if lines:
            return UserError(f"{source}: " + "; ".join(mistake.in_file() for mistake in lines))
    raise AssertionError("the last layer has the mistakes that last")


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files after `--config`, the other words) of a command line.

    Raises: UserError if no file follows.
    """
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
    value: object = default
    for path in files:
        values: object = read_yaml(path)
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
    complete: Callable[[C, Origins], C] = lambda config, _: config,
) -> C:
    """The options of one program: `--config` files, then the command line over them; then `complete`.

    `--print-config` prints the resolved options, with `--changed` only those that differ from the defaults, and exits.
    """
    if {"--help", "-h", "--help-all"} & {*argv}:
        print(full_help(cls, prog, description))
        raise SystemExit(0)
    shown = PRINT_OPTIONS & {*argv} if "--print-config" in argv else set()
    read = layers(cls, [word for word in argv if word not in shown], overlay)
    config = complete(combine(cls, read), origins(read))
    refuse_secrets(config.model_dump(mode="json"))
    if shown:
        print(tree_to_yaml(changed(config, cls())) if "--changed" in shown else to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """All resolved options; `--config` reads them back."""
    return tree_to_yaml(config.model_dump(mode="json"))


def tree_to_yaml(tree: Tree) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def changed(config: Config, default: Config) -> Tree:
    """The options that differ from `default`; `--config` reads them back to the same config."""
    return difference(config.model_dump(mode="json"), default.model_dump(mode="json"))


def difference(tree: Tree, default: Tree) -> Tree:
    """The values of a tree that differ from those of `default`."""
    different: Tree = {}
    for name, value in tree.items():
        both = isinstance(value, dict) and isinstance(default.get(name), dict)
        own_value = difference(value, default[name]) if both else value
        if own_value != ({} if both else default.get(name)):
            different[name] = own_value
    return different
