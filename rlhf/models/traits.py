"""Properties of a transformers architecture, from its class and config."""

import inspect
from typing import Any

from transformers import DynamicCache, DynamicLayer, PretrainedConfig


def has_argument(model: Any, argument: str) -> bool:
    """Whether the forward pass of a transformers model has this argument."""
    return argument in inspect.signature(model.forward).parameters


def attends_to_all(config: PretrainedConfig) -> bool:
    """Whether every layer attends to all tokens: no sliding window, no recurrent state."""
    windowed = getattr(config, "window_size", None) is not None  # GPT-Neo: its cache has all tokens
    return not windowed and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
