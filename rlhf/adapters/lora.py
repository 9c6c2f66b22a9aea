"""LoRA: low-rank updates of frozen weights (arXiv 2106.09685), by peft."""

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
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


def build(config: Config, model: PreTrainedModel) -> PeftModel:
    """`model` with adapters in its dtype. It equals `model` until the first step. Dropout is 0, as PPO requires."""
    lora = LoraConfig(
        r=config.r, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=config.target_modules, bias="none"
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def merged_state(model: PeftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state`, the weights of the wrapped base model, with the updates added in fp32, by their original names."""
    merged = {_own_name(name): value for name, value in state.items() if "lora_" not in name}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            parameter = getattr(
                layer, "parameter_name", "weight"
            )  # the experts of a mixture are parameters of one module
            with gather_weights(layer.parameters()):
                weight = getattr(layer.get_base_layer(), parameter)
                delta = layer.get_delta_weight(layer.active_adapters[0])
                updated = (weight.float() + delta.float()).to(weight.dtype)
            merged[_own_name(f"{name}.{parameter}")] = updated.detach().cpu()
    return merged


def _own_name(name: str) -> str:
    """The name that the weight had before wrapping."""
    return ".".join(part for part in name.split(".") if part != "base_layer")
