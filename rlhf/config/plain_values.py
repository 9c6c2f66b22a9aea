"""YAML from files of other people: plain values, and no key twice. Torch-free."""

from typing import Any

import yaml


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
