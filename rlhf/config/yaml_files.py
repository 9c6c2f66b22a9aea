"""YAML: plain values only, and no key twice; a file of options. Torch-free."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.record import Tree
from rlhf.errors import UserError
from rlhf.shipped import config_file

BASE_60, EXPONENT = re.compile(r"[-+]?\d+(:\d+)+(\.\d*)?"), re.compile(r"[-+]?(\d+|\d*\.\d+)[eE][-+]?\d+")
"""YAML 1.1 reads 2:4:4 as 7444 and 1e4 as text; YAML 1.2 reads text and 10000"""


class PlainLoader(yaml.SafeLoader):
    """Loads plain values only. A key that comes twice is an error; YAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' comes twice", problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def from_yaml(text: str) -> Any:
    """The value. Raises: yaml.YAMLError, ValueError."""
    return yaml.load(text, PlainLoader)


class _Loader(PlainLoader):
    """Reads numbers as people and YAML 1.2 mean them."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        tag = str(super().resolve(kind, value, implicit))
        if kind is yaml.ScalarNode and value and tag.endswith((":int", ":float")) and BASE_60.fullmatch(value):
            return "tag:yaml.org,2002:str"
        plain = kind is yaml.ScalarNode and implicit == (True, False)
        return "tag:yaml.org,2002:float" if plain and value and EXPONENT.fullmatch(value) else tag

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value = super().construct_scalar(node)
        if value.startswith(("${", "$HOME")):
            problem = f"got '{value}', whose variable is not read in a file; expected the value, or the option on the "
            problem += "command line, where the shell reads it"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return str(value)


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
