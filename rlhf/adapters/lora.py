"""LoRA: low-rank updates of frozen weights (arXiv 2106.09685), by peft; variants and initialisations are options."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from peft import LoraConfig
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter, Targets, refuse_compiler
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.models.adapter_files import precise, tuner_layers

LEARNING_RATE = 2e-4
"""of GPT-2 and GPT-3 in the paper (tables 11 and 12); peft's method_comparison has 1e-4 (0.478 on Llama-3.2-3B)"""
PISSA_LEARNING_RATE = 2e-5
"""arXiv 2404.02948, section 5; the first step already moves the largest directions of the weights"""
FUSED = ("falcon_h1", "nemotron_h")
"""families whose kernels read the weight of `out_proj` past its layer; peft refuses LoRA there"""
START = "start"
"""the frozen second adapter of an initialisation that takes the update's start out of the weights"""


class Config(Targets):
    r: int = Field(16, ge=1)
    """rank of the update"""
    lora_alpha: int = Field(32, ge=1)
    """the update is scaled by lora_alpha / r"""
    use_rslora: bool = False
    """scale by lora_alpha / sqrt(r) instead, which does not shrink with a large rank (rsLoRA, arXiv 2312.03732)"""
    use_dora: bool = False
    """also train the norm of each row of the weight (DoRA, arXiv 2402.09353)"""
    init_lora_weights: str = "default"
    """start of the update: default (B = 0), gaussian; pissa (the largest singular values, arXiv 2404.02948;
    pissa_niter_4: by fast SVD) and olora (a QR decomposition, arXiv 2406.01775), which take their start out of the
    weights"""

    @field_validator("init_lora_weights")
    @classmethod
    def _known(cls, value: str) -> str:
        if not re.fullmatch(r"default|gaussian|pissa(_niter_\d+)?|olora", value):
            raise ValueError("expected default, gaussian, pissa, pissa_niter_N or olora")
        return value

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if self.use_dora and self.init_lora_weights.startswith(("pissa", "olora")):
            raise ValueError("use_dora: excludes init_lora_weights pissa and olora, which start with an update")
        return self


def build(config: Config) -> "LoRA":
    """Updates in the dtype of the model. Dropout is 0, as PPO requires."""
    start = config.init_lora_weights
    options = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.target_modules,
        bias="none",
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=True if start == "default" else start,  # type: ignore[arg-type]  # pissa_niter_N is a pattern
    )
    return LoRA(options, PISSA_LEARNING_RATE if start.startswith("pissa") else LEARNING_RATE)


class LoRA(PeftAdapter):
    """The adapter of any `LoraConfig` of peft."""

    def __init__(self, options: LoraConfig, learning_rate: float = LEARNING_RATE) -> None:
        super().__init__(options, learning_rate)
        self._starts_moved = str(options.init_lora_weights).startswith(("pissa", "olora"))
        self._title = f"adapter lora: init_lora_weights {options.init_lora_weights}"

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError for the compiler with a variant, with which it has not been tested."""
        if self._starts_moved or getattr(self._options, "use_dora", False):
            refuse_compiler(options, "lora with use_dora, pissa or olora")

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        if options.target_modules == "all-linear" and model.config.model_type in FUSED:
            options.exclude_modules = ["out_proj"]
        return options

    def wrap(self, model: PreTrainedModel) -> None:
        super().wrap(model)
        if not self._starts_moved:
            return
        options: Any = self._options
        plain = LoraConfig(r=options.r, lora_alpha=options.lora_alpha, use_rslora=options.use_rslora)
        for _, layer in tuner_layers(model):  # the layer at its start is not the layer before wrapping
            layer.update_layer(START, options.r, lora_alpha=options.lora_alpha, config=plain)
        self._keep_start(model)

    def _keep_start(self, model: PreTrainedModel) -> None:
        """Copy the update into the frozen second adapter, which is the reference."""
        for name, layer in tuner_layers(model):
            for factor in (layer.lora_A, layer.lora_B):
                if "default" not in factor:
                    raise UserError(f"{self._title}: got the layer {name}, expected linear layers")
                trained, start = factor["default"].weight, factor[START].weight
                if trained.shape != start.shape:
                    narrow = min(layer.in_features, layer.out_features) < layer.r["default"]
                    reason = f"is narrower than r={layer.r['default']}" if narrow else "is transposed, as in GPT-2"
                    raise UserError(f"{self._title}: layer {name} {reason}")
                start.data = trained.detach().clone()
                start.requires_grad_(False)

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        if not self._starts_moved:
            with super().disabled(model):
                yield
            return
        layers = [layer for _, layer in tuner_layers(model)]
        for layer in layers:
            layer.set_adapter([START], inference_mode=True)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_adapter(["default"])

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The update, as the forward pass computes it, is added in fp32."""
        if getattr(layer, "lora_variant", True):  # DoRA also scales the weight; rows of new tokens are no LoRA
            return super().merged_layer(layer)
        parameter = getattr(layer, "parameter_name", "weight")  # a mixture's experts are parameters of one module
        weight = getattr(layer.get_base_layer(), parameter)
        delta = layer.get_delta_weight(layer.active_adapters[0])
        return {parameter: (precise(weight) + precise(delta)).to(weight.dtype).detach().cpu()}
