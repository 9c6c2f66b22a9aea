"""LoRA: low-rank updates of frozen weights (arXiv 2106.09685), by peft."""

from typing import Any

from peft import LoraConfig
from pydantic import Field
from torch import Tensor

from rlhf.adapters._peft import PeftAdapter
from rlhf.config import Config as Base


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


class LoRA(PeftAdapter):
    """The adapter of any `LoraConfig` of peft."""

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The update, as the forward pass computes it, is added in fp32."""
        parameter = getattr(layer, "parameter_name", "weight")  # a mixture's experts are parameters of one module
        weight = getattr(layer.get_base_layer(), parameter)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        return {parameter: (weight.float() + delta.float()).to(weight.dtype).detach().cpu()}
