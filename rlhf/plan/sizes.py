"""What a model's config alone tells: its weights and its key-value cache. No weight is loaded."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from rlhf import adapters
from rlhf.config import read_yaml
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.models import load
from rlhf.models.head import ScoreHead
from rlhf.models.scalar import hidden_width
from rlhf.shipped import CONFIGS
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer

Head = Literal["lm", "scalar"]
"""A language model, or a backbone under one scalar."""
SHAPES = CONFIGS / "shapes"
"""Configs of known models, by short name, for plans where no model hub can be reached."""


@dataclass(frozen=True, slots=True)
class Size:
    """Counts of one model."""

    total: int
    """weights, those of adapters included"""
    trained: int
    """weights that a step changes"""
    largest: int
    """weights in the largest tensor that a step changes"""
    outer: int
    """weights outside the layers: embeddings, head, last norm"""
    layers: int
    hidden: int
    cache: int
    """numbers that the key-value cache keeps of a token, over all layers"""
    vocabulary: int
    """rows of the embeddings, and logits of a token if it is a language model"""


@functools.cache
def read(place: str) -> PreTrainedConfig:
    """The config of a model: a directory, a hub id, a short name, or a YAML file with a `model` section.

    A short name that is no directory here is looked up in `configs/shapes/` first, so that no hub is asked.
    Raises: UserError if there is none, or it cannot be had.
    """
    known = SHAPES / f"{place.lower()}.yaml"
    path = str(known) if known.is_file() and not Path(place).exists() else short_names.resolve(place)
    if path.endswith((".yaml", ".yml")) and "tokenizer" not in read_yaml(path):
        return _shape(path)
    try:
        return load.load_config(path)
    except UserError as error:
        raise UserError(
            f"{error}; a plan needs no more than its config: a directory with config.json, or a .yaml as in "
            "configs/shapes/"
        ) from None


def _shape(path: str) -> PreTrainedConfig:
    values = read_yaml(path).get("model")
    if not isinstance(values, dict) or not {"model_type", "vocab_size"} <= set(values):
        raise UserError(f"{path}: expected a 'model' mapping with 'model_type' and 'vocab_size', as in configs/shapes/")
    with load.readable(path):
        config = AutoConfig.for_model(**values)
    load.still(config)
    return config


@functools.cache
def tokens(place: str) -> int | None:
    """Tokens of the tokenizer at `place`, which the embeddings grow to; None where the config alone is there."""
    path = Path(short_names.resolve(place))
    described = path.is_file() and "tokenizer" in read_yaml(path)
    saved = any((path / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    return id_count(load_tokenizer(str(path))) if described or saved else None


def build(config: PreTrainedConfig, head: Head, adapter: str | None = None) -> nn.Module:
    """The model of a config, on the device of the context, adapters around what they wrap."""
    auto: Any = AutoModelForCausalLM if head == "lm" else AutoModel
    model = auto.from_config(config)
    wrapped = adapters.wrap(model, adapter)
    if head == "lm":
        return wrapped
    return nn.ModuleDict({"backbone": wrapped, "score": ScoreHead(torch.zeros(1, hidden_width(model)))})


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no list of layers"
    return max(lists, key=lambda each: (len(each), sum(p.numel() for p in each.parameters())))


@functools.cache
def size(place: str, head: Head, adapter: str | None = None, frozen: bool = False) -> Size:
    """Counts of the model at `place`, exact, from its config on the meta device. A frozen model trains nothing."""
    config = grown(place)
    with torch.device("meta"):
        model = build(config, head, adapter)
    counts = [weight.numel() for weight in model.parameters()]  # tied weights come once
    trained = [weight.numel() for weight in model.parameters() if weight.requires_grad and not frozen]
    layers = layers_of(model)
    return Size(
        total=sum(counts),
        trained=sum(trained),
        largest=max(trained, default=0),
        outer=sum(counts) - sum(weight.numel() for weight in layers.parameters()),
        layers=len(layers),
        hidden=config.get_text_config().hidden_size,
        cache=_cache(config, len(layers)),
        vocabulary=config.get_text_config().vocab_size,
    )


@functools.cache
def grown(place: str) -> PreTrainedConfig:
    """The config with a vocabulary of at least the tokenizer's tokens, as the model is loaded."""
    config, known = copy.deepcopy(read(place)), tokens(place)
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, known or 0)
    return config


def _cache(config: PreTrainedConfig, layers: int) -> int:
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * width
