"""Options: typed records, their YAML files and command lines. Torch-free.

A plug-in declares its options as a subclass of `Config`.
"""

from rlhf.config.mistakes import suggest, validate
from rlhf.config.parser import merge, parse
from rlhf.config.record import Config, Tree, option_names
from rlhf.config.yaml_files import read_yaml

__all__ = ["Config", "Tree", "merge", "option_names", "parse", "read_yaml", "suggest", "validate"]
