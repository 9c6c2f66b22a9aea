"""One YAML file of options, read without trust: plain values only, no key twice, no aliases without end. Torch-free."""

import copy
import functools
import itertools
from pathlib import Path

import yaml

from rlhf.config.record import Tree
from rlhf.errors import UserError
from rlhf.shipped import config_file

MAX_VALUES = 100_000
"""maximum number of values in one YAML file, with every alias expanded"""


class _Loader(yaml.SafeLoader):
    """Loads plain values only. A key that comes twice is an error; YAML would silently use the last one."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MAX_VALUES:
            problem = f"with its aliases expanded it has more than {MAX_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = super().construct_scalar(node)
        if "\0" in str(text) or not is_utf8(str(text)):
            problem = f"got {text[:40]!a}, expected text that a file or a path can have"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' comes twice", problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def _values(node: object, counts: dict[int, float]) -> float:
    """The number of values of a node with every alias expanded; infinite for a node that contains itself."""
    if id(node) not in counts:
        counts[id(node)] = float("inf")
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = itertools.chain.from_iterable(children) if isinstance(node, yaml.MappingNode) else children
        counts[id(node)] = 1 + sum(_values(child, counts) for child in flat)
    return counts[id(node)]


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> object:
    """A chain reads each of its files several times, and PyYAML's parser is in Python."""
    return yaml.load(text, _Loader) or {}


def read_yaml(path: str | Path) -> Tree:
    """One YAML mapping. Keys may be written with hyphens.

    Raises: UserError with the path, and the line of a syntax mistake.
    """
    try:
        values = copy.deepcopy(_parsed(config_file(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); expected a YAML file") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid UTF-8, or a month 13
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: got a {type(values).__name__}, expected a mapping of options")
    return _underscored(values)


def _underscored(values: dict[object, object]) -> Tree:
    return {
        str(key).replace("-", "_"): _underscored(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def is_utf8(word: str) -> bool:
    """Whether a text of the operating system was valid UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
