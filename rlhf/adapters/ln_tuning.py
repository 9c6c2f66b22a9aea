"""LN tuning: only the weights and biases of the normalisation layers are trained (arXiv 2312.11420), by peft."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from peft import LNTuningConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter
from rlhf.config import Config as Base
from rlhf.distributed.zero3 import gather_weights

LEARNING_RATE = 1e-3
"""as BitFit, which has about as few weights; at 1e-4 peft's method_comparison (Llama-3.2-3B) has accuracy 0.00"""


class Config(Base):
    """LN tuning has no options: it trains every normalisation layer."""


def build(config: Config) -> "LNTuning":
    """The trained layers start as copies of the model's own."""
    return LNTuning(LNTuningConfig(), LEARNING_RATE)


class LNTuning(PeftAdapter):
    """peft knows the names of the layers for few model types; here their class says it."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        options.target_modules = [name for name, _ in _norms(model)]
        return options

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """peft copies the layers."""
        return gather_weights([weight for _, norm in _norms(model) for weight in norm.parameters()])

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The copy replaces the layer. Rows of new tokens are another method's."""
        if not hasattr(layer, "ln_tuning_layers"):
            return super().merged_layer(layer)
        trained = layer.ln_tuning_layers[layer.active_adapters[0]]
        return {name: weight.detach().cpu() for name, weight in trained.named_parameters()}


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers that have weights, by name."""
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None:
            yield name, module
