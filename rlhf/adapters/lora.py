"""LoRA: low-rank updates beside frozen weights (arXiv 2106.09685), through peft."""

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config import Config as Base


class Config(Base):
    r: int = 16
    """rank of the update"""
    lora_alpha: int = 32
    """the update is scaled by lora_alpha / r"""
    target_modules: str | list[str] = "all-linear"
    """modules that get an update, as peft names them"""


def build(config: Config, model: PreTrainedModel) -> PeftModel:
    """`model` with adapters in its own dtype; equal to `model` until the first step. Dropout stays 0, as PPO needs."""
    lora = LoraConfig(
        r=config.r, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=config.target_modules, bias="none"
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def merged_state(model: PeftModel) -> dict[str, Tensor]:
    """Weights of the base model with the updates added in fp32, under the base model's own names, on the CPU."""
    base = model.get_base_model()
    copies: dict[int, Tensor] = {}
    state = {
        name.replace(".base_layer.", "."): copies.setdefault(value.data_ptr(), value.detach().cpu())
        for name, value in base.state_dict().items()
        if "lora_" not in name
    }
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            weight = layer.get_base_layer().weight
            delta = layer.get_delta_weight(layer.active_adapters[0])
            state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype).detach().cpu()
    return state
