"""LoRA: low-rank updates of frozen weights (arXiv 2106.09685), by peft; variants are options."""

from typing import Any

from peft import LoraConfig
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter, refuse_compiler
from rlhf.config import Config as Base
from rlhf.config.options import EngineOptions
from rlhf.models.adapter_files import precise

LEARNING_RATE = 2e-4
"""of GPT-2 and GPT-3 in the paper (tables 11 and 12); peft's method_comparison has 1e-4 (0.478 on Llama-3.2-3B)"""
FUSED = ("falcon_h1", "nemotron_h")
"""families whose kernels read the weight of `out_proj` past its layer; peft refuses LoRA there"""


class Config(Base):
    target_modules: str | list[str] = "all-linear"
    """layers that the method changes, as peft names them: all-linear, a list of names, or a regular expression"""
    r: int = Field(16, ge=1)
    """rank of the update"""
    lora_alpha: int = Field(32, ge=1)
    """the update is scaled by lora_alpha / r"""
    use_rslora: bool = False
    """scale by lora_alpha / sqrt(r) instead, which does not shrink with a large rank (rsLoRA, arXiv 2312.03732)"""
    use_dora: bool = False
    """also train the norm of each row of the weight (DoRA, arXiv 2402.09353)"""


def build(config: Config) -> "LoRA":
    """Updates in the dtype of the model. Dropout is 0, as PPO requires."""
    options = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.target_modules,
        bias="none",
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
    return LoRA(options, LEARNING_RATE)


class LoRA(PeftAdapter):
    """The adapter of any `LoraConfig` of peft."""

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError for the compiler with a variant, with which it has not been tested."""
        if getattr(self._options, "use_dora", False):
            refuse_compiler(options, "lora with use_dora")

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        if options.target_modules == "all-linear" and model.config.model_type in FUSED:
            options.exclude_modules = ["out_proj"]
        return options

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The update, as the forward pass computes it, is added in fp32."""
        if getattr(layer, "lora_variant", True):  # DoRA also scales the weight; rows of new tokens are no LoRA
            return super().merged_layer(layer)
        parameter = getattr(layer, "parameter_name", "weight")  # a mixture's experts are parameters of one module
        weight = getattr(layer.get_base_layer(), parameter)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        return {parameter: (precise(weight) + precise(delta)).to(weight.dtype).detach().cpu()}
