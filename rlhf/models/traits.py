"""Properties of a transformers architecture that its public interface does not tell: arguments, classes, layers.

All that the project asks of the shape of transformers' classes stands here, and tests/rlhf/models/test_traits.py tells
what has moved. Seen in transformers 5.17 to 5.24.
"""

import inspect
import math
from typing import Any

from transformers import Cache, DynamicCache, DynamicLayer, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

Model = PreTrainedModel | type[PreTrainedModel]
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""the argument of a forward pass for the cache: since 5.24, and before"""
READS_PADDING = "recurrent_gemma"
"""the model type whose recurrent layers read padding, so that it cannot sample rows of unequal length"""


def has_argument(model: Model, argument: str) -> bool:
    """Whether the forward pass of a transformers model, or class, has this argument."""
    return argument in inspect.signature(model.forward).parameters


def cache_argument(model: Model) -> str | None:
    """The argument of the forward pass of a transformers model, or class, for its cache."""
    return next((name for name in CACHE_ARGUMENTS if has_argument(model, name)), None)


def cache_input(model: PreTrainedModel, cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as an input of the forward pass of a model that has one."""
    name = cache_argument(model)
    assert name is not None, f"{type(model).__name__} has no cache"
    return {name: cache}


def has_attention(config: PretrainedConfig) -> bool:
    """Whether a model of this config has attention: Mamba, RWKV and their like have none."""
    text = config.get_text_config()
    return not isinstance(text, PretrainedConfig) or "num_attention_heads" in {*vars(text), *text.attribute_map}


def has_key_value_cache(model: Model, config: PretrainedConfig) -> bool:
    """Whether a model, or class, can generate with keys and values: Mamba and its like have a cache without any."""
    return cache_argument(model) is not None and has_attention(config) and config.model_type != READS_PADDING


def class_of(auto: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a model of a config's type, of those of an auto class; None: transformers has none."""
    return auto._model_mapping.get(type(config), None)


def reach(config: PretrainedConfig) -> float:
    """The tokens of the longest row in which every layer attends to all tokens: that of the shortest window or chunk,
    infinite without any, 0 with a recurrent state."""
    if getattr(config, "window_size", None) is not None:  # GPT-Neo: its cache has all tokens
        return 0.0
    if config.model_type == READS_PADDING:  # transformers 5.17 lists only the windows of its other layers
        return 0.0
    return min(map(_reach_of_layer, DynamicCache(config=config).layers))


def _reach_of_layer(cache: object) -> float:
    if type(cache) is DynamicSlidingWindowLayer:
        return float(cache.sliding_window)
    return math.inf if type(cache) is DynamicLayer else 0.0


def attention_options(config: PretrainedConfig) -> dict[str, str]:
    """The option that loads a model whose attention has a cap on its logits (Gemma 2) with one that keeps it:
    transformers below 5.24 chooses another."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}
