"""What an architecture of transformers can do, as far as its class and config tell."""

import inspect
from typing import Any

from transformers import DynamicCache, DynamicLayer, PretrainedConfig


def takes(model: Any, argument: str) -> bool:
    """Whether the forward pass of a transformers model has this argument."""
    return argument in inspect.signature(model.forward).parameters


def keeps_all(config: PretrainedConfig) -> bool:
    """Whether every layer attends to all tokens: no sliding window, no recurrent state."""
    windowed = getattr(config, "window_size", None) is not None  # GPT-Neo, whose cache keeps all
    return not windowed and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
