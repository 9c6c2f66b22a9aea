"""One YAML file of options, plain values only, and no key twice. Torch-free."""

import copy
import functools
from pathlib import Path

import yaml

from rlhf.config.record import Tree
from rlhf.errors import UserError
from rlhf.shipped import config_file


class _Loader(yaml.SafeLoader):
    """Loads plain values only. A key that comes twice is an error; YAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' comes twice", problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


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
