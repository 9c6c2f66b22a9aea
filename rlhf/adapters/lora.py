"""LoRA: low-rank updates of frozen weights (arXiv 2106.09685), by peft."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config import Config as Base
from rlhf.distributed.zero3 import gather_weights


class Config(Base):
    r: int = Field(16, ge=1)
    """rank of the update"""
    lora_alpha: int = Field(32, ge=1)
    """the update is scaled by lora_alpha / r"""
    target_modules: str | list[str] = "all-linear"
    """modules that get an update, as peft names them"""


def build(config: Config) -> "LoRA":
    """Updates in the dtype of the model. Dropout is 0, as PPO requires."""
    return LoRA(
        LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules=config.target_modules,
            bias="none",
        )
    )


class LoRA:
    """The adapter of any `LoraConfig` of peft."""

    def __init__(self, options: LoraConfig) -> None:
        self._options = options

    def wrap(self, model: PreTrainedModel) -> None:
        # peft changes the model in place, and writes the names of the modules into the options.
        get_peft_model(model, copy.deepcopy(self._options), autocast_adapter_dtype=False)

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        layers = [layer for _, layer in _layers(model)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The updates are added in fp32."""
        merged = {_own_name(name): value for name, value in state.items() if "lora_" not in name}
        for name, layer in _layers(model):
            parameter = getattr(layer, "parameter_name", "weight")  # a mixture's experts are parameters of one module
            with gather_weights(layer.parameters()):
                weight = getattr(layer.get_base_layer(), parameter)
                delta = layer.get_delta_weight(layer.active_adapters[0])
                updated = (weight.float() + delta.float()).to(weight.dtype)
            merged[_own_name(f"{name}.{parameter}")] = updated.detach().cpu()
        return merged


def _layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """The layers with an update, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _own_name(name: str) -> str:
    """The name that the weight had before wrapping."""
    return ".".join(part for part in name.split(".") if part != "base_layer")
