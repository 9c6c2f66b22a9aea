"""From a pretrained language model to an RLHF-tuned one. `from rlhf import sft, reward, ppo, train` calls the programs.

Importing this package imports nothing else; the functions are in rlhf/chain/api.py.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.chain.api import Result, RunError, ppo, reward, sft, train

__all__ = ["Result", "RunError", "ppo", "reward", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("rlhf.chain.api"), name)
    raise AttributeError(f"module 'rlhf' has no attribute '{name}'")
