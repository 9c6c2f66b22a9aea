"""What the programs of this room share: their options, read and checked before libraries are imported. Torch-free."""

import sys
from collections.abc import Callable
from typing import TypeVar

from rlhf import console
from rlhf.config import parser
from rlhf.config.options import PromptFileOptions
from rlhf.errors import UserError

C = TypeVar("C", bound=PromptFileOptions)


def read_options(cls: type[C], name: str, description: str, check: Callable[[C], None]) -> C:
    """The options of the command line after `check`. Then a line announces the import of the libraries.

    Raises: UserError.
    """
    options = parser.parse(cls, sys.argv[1:], console.program(name), description)
    check(options)
    console.loading(console.program(name), sys.argv)
    console.quiet_libraries()
    return options


def require_prompts(options: PromptFileOptions) -> None:
    """Raises: UserError if no file of prompts is named."""
    if options.prompts is None:
        raise UserError("--prompts: not given, expected a .jsonl or .txt file")
