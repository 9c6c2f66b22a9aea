"""JSON and YAML from files of other people: plain values, no key twice in YAML, and no deeper than any program writes.

Python's parsers follow any depth until the stack ends, with a RecursionError here or in the first function that walks
the value; a few lines of YAML, whose aliases repeat each other, stand for billions of values. Torch-free.
"""

import json
from typing import Any

import yaml

MAX_DEPTH = 100
"""levels of nesting"""
TOO_DEEP = "nested in more than 100 levels"
MAX_VALUES = 1_000_000
"""values with every alias written out"""


class PlainLoader(yaml.SafeLoader):
    """Loads plain values only. A key that comes twice is an error; YAML would silently use the last one."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Ends at the first level that is too deep: PyYAML's time is quadratic in the depth."""
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # the last level may have plain values
            raise ValueError(TOO_DEEP)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' comes twice", problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def from_json(text: str) -> Any:
    """The value. Raises: ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    require_small(value)
    return value


def from_yaml(text: str) -> Any:
    """The value. Raises: yaml.YAMLError, ValueError."""
    value = yaml.load(text, PlainLoader)
    require_small(value)
    return value


def require_small(value: object) -> None:
    """Raises: ValueError for a value with too many levels, or too many values."""
    waiting, count = [(value, 1)], 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if count > MAX_VALUES:
            raise ValueError(f"stands for more than {MAX_VALUES:,} values")
        if isinstance(item, dict):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend((inner, depth + 1) for inner in item)
