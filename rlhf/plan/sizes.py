"""Sizes that follow from a model's config alone: its weights and its key-value cache. No weight is loaded."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from rlhf import adapters
from rlhf.config import Tree, read_yaml
from rlhf.config.options import Optim, Quantize
from rlhf.engine.optimizers import outer_weights, state_numbers
from rlhf.errors import UserError
from rlhf.hub import short_names
from rlhf.hub.offline import require_hub
from rlhf.hub.untrusted import with_file
from rlhf.models import load, new_rows
from rlhf.models.head import ScoreHead
from rlhf.models.quantized import BITS, quantizable
from rlhf.models.scalar import hidden_width
from rlhf.roles import Kind
from rlhf.shipped import CONFIGS
from rlhf.text.encoder import id_count
from rlhf.text.tokenizer import load_tokenizer

SHAPES = CONFIGS / "shapes"
"""Configs of the models with a short name, for plans without access to a model hub: one file a family."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a stage makes of a model."""

    adapter: str | None = None
    frozen: bool = False
    """whether no weight is trained"""
    quantize: Quantize = "none"
    optim: Optim = "adamw"
    ids: tuple[int, int] | None = None
    """(ids of the tokenizer before this stage adds tokens, ids after it); beside an adapter the new rows are trained"""


WHOLE = Setup()
"""All weights are trained by AdamW."""


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of weights and other sizes of one model."""

    total: int
    """weights, adapters included"""
    trained: int
    """trainable weights"""
    largest: int
    """weights in the largest trainable tensor"""
    outer: int
    """weights outside the layers: embeddings, head, last norm"""
    layers: int
    hidden: int
    cache: int
    """numbers in the key-value cache per token, over all layers"""
    vocabulary: int
    """rows of the embedding matrix; a language model has as many logits per token"""
    quantized: int = 0
    """weights that are stored in `bits` bits"""
    bits: float = 0.0
    linear: int = 0
    """numbers in linear layers that are not quantised, of which decoding on a CPU has copies"""
    state: tuple[int, int] = (0, 0)
    """(fp32 numbers, 8-bit codes) in the optimizer's state beside the master weights"""

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state beside the master weights, on one device."""
        numbers, codes = self.state
        return 4 * numbers + codes

    @property
    def saved_bytes(self) -> int:
        """Bytes of the trained weights and the optimizer's state in a checkpoint: every number is in fp32 there."""
        return 4 * (self.trained + sum(self.state))

    def weight_bytes(self, b: int) -> float:
        """Bytes of all weights on one device; `b`: of a number in the compute dtype."""
        return b * (self.total - self.quantized) + self.bits / 8 * self.quantized


@functools.cache
def read_config(model_path: str) -> PreTrainedConfig:
    """The config of a model: a directory, a hub id, a short name, or a YAML file with a `model` section.

    A short name, or its hub id, that is no local directory has its config in `configs/shapes/`: no request is sent.
    Raises: UserError if there is no such model, or its config cannot be read.
    """
    values = None if Path(model_path).exists() else shapes().get(short_names.short_name(model_path))
    if values is not None:
        return _config_from_values(values, model_path)
    path = short_names.resolve(model_path)
    if path.endswith((".yaml", ".yml")) and "tokenizer" not in read_yaml(path):
        return _config_from_yaml(path)
    if not Path(path).exists() and "/" not in path:
        require_hub(path)  # its client would ask for a minute
    try:
        config = load.load_config(path)
    except UserError as error:
        raise UserError(
            f"{error}; a plan needs the config alone: a directory with config.json, or a .yaml file with a 'model' "
            "section"
        ) from None
    load.require_decoder(path)
    return config


@functools.cache
def shapes() -> dict[str, Tree]:
    """The values of the config of each model in `configs/shapes/`, by short name in lower case."""
    values: dict[str, Tree] = {}
    for file in sorted(SHAPES.glob("*.yaml")):
        family = read_yaml(file)
        for names, own_values in family["models"].items():
            values |= {name.replace("_", "-"): family["common"] | own_values for name in names.split()}
    return values


def _config_from_yaml(path: str) -> PreTrainedConfig:
    values = read_yaml(path).get("model")
    if not isinstance(values, dict) or not {"model_type", "vocab_size"} <= set(values):
        raise UserError(f"{path}: expected a 'model' mapping with 'model_type' and 'vocab_size'")
    return _config_from_values(values, path)


def _config_from_values(values: Tree, source: str) -> PreTrainedConfig:
    with load.explain_load_errors(source):
        config = AutoConfig.for_model(**values)
    load.remove_randomness(config)
    return config


@functools.cache
def local_tokenizer(model_path: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None if it is not on this machine, or the model has none."""
    path = Path(with_file(short_names.resolve(model_path), "tokenizer_config.json", "tokenizer.json"))
    described = path.is_file() and "tokenizer" in read_yaml(path)
    saved = any((path / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    return load_tokenizer(str(path)) if described or saved else None


def build(config: PreTrainedConfig, kind: Kind, setup: Setup = WHOLE) -> nn.Module:
    """The model of a config with its adapters, on the device of the context."""
    auto: Any = AutoModelForCausalLM if kind == "lm" else AutoModel
    model, adapter = auto.from_config(config), setup.adapter
    wrapped = adapters.wrap(model, adapter)
    if adapter is not None and setup.ids is not None and setup.ids[0] < setup.ids[1]:
        new_rows.train(model, range(*setup.ids))
    if kind == "lm":
        return wrapped
    return nn.ModuleDict({"backbone": wrapped, "score": ScoreHead(torch.zeros(1, hidden_width(model)))})


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no list of layers"
    return max(lists, key=lambda modules: (len(modules), sum(p.numel() for p in modules.parameters())))


@functools.cache
def size(model_path: str, kind: Kind, setup: Setup = WHOLE) -> Size:
    """Exact sizes of a model, counted on the meta device from its config."""
    config, quantize = resized_config(model_path, setup), setup.quantize
    with load.explain_load_errors(model_path), torch.device("meta"):
        model = build(config, kind, setup)
    counts = [weight.numel() for weight in model.parameters()]  # tied weights count once
    weights = [weight for weight in model.parameters() if weight.requires_grad and not setup.frozen]
    trained, outer = [weight.numel() for weight in weights], outer_weights(model)
    states = [state_numbers(setup.optim, weight.shape, id(weight) in outer) for weight in weights]
    layers = layers_of(model)
    quantized = quantizable(model, setup.adapter is not None) if quantize != "none" else []
    rows = config.get_text_config().vocab_size
    linear = [m.weight for m in model.modules() if type(m) is nn.Linear]
    if quantized:
        linear = [weight for weight in linear if weight.requires_grad or len(weight) == rows]
    return Size(
        total=sum(counts),
        trained=sum(trained),
        largest=max(trained, default=0),
        outer=sum(counts) - sum(weight.numel() for weight in layers.parameters()),
        layers=len(layers),
        hidden=config.get_text_config().hidden_size,
        cache=_cache_numbers(config, len(layers)),
        vocabulary=config.get_text_config().vocab_size,
        quantized=sum(quantized),
        bits=BITS.get(quantize, 0.0),
        linear=sum(weight.numel() for weight in linear),
        state=(sum(numbers for numbers, _ in states), sum(codes for _, codes in states)),
    )


@functools.cache
def resized_config(model_path: str, setup: Setup = WHOLE) -> PreTrainedConfig:
    """The config with a vocabulary of at least the tokenizer's size, as when the model is loaded."""
    config, tokenizer = copy.deepcopy(read_config(model_path)), local_tokenizer(model_path)
    text = config.get_text_config()
    bundled = 0 if tokenizer is None else id_count(tokenizer)
    text.vocab_size = max(text.vocab_size, bundled, max(setup.ids or (0,)))
    return config


def _cache_numbers(config: PreTrainedConfig, layers: int) -> int:
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * width
