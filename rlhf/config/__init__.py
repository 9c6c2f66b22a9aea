"""Options: typed records, their YAML files and command lines. Torch-free.

A plug-in declares its options as a subclass of `Config`.
"""

from rlhf.config.mistakes import suggest, suggest_options, validate
from rlhf.config.parser import merge, parse, peek, split_config_files, to_yaml
from rlhf.config.record import Config, Tree, option_names
from rlhf.config.yaml_files import read_yaml

__all__ = [
    "Config",
    "Tree",
    "merge",
    "option_names",
    "parse",
    "peek",
    "read_yaml",
    "split_config_files",
    "suggest",
    "suggest_options",
    "to_yaml",
    "validate",
]
