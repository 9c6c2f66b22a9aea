"""Which options the user has set, on the command line or in files. Torch-free."""

import re
from collections.abc import Sequence
from typing import Any

from rlhf.config import parser


def set_options(argv: Sequence[str], overlay: parser.Overlay = parser.NO_OVERLAY) -> set[str]:
    """The options at the top of the `--config` files, and all options of the command line, as `sft.max_length`."""
    return command_line_options(argv).union(*trees_of(argv, overlay))


def command_line_options(argv: Sequence[str]) -> set[str]:
    """The options on the command line, spelled `sft.max_length`."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return names | {re.sub(r"(^|\.)no_", r"\1", name) for name in names}


def trees_of(argv: Sequence[str], overlay: parser.Overlay) -> list[dict[str, Any]]:
    """The options of each `--config` file, and of the overlay."""
    files, _ = parser.split_config_files(argv)
    return [tree for _, tree in parser.trees(files, overlay)]
