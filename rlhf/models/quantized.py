"""Frozen weights in 4 bits, stored by bitsandbytes, under an adapter that is trained (QLoRA, arXiv 2305.14314).

The matrices of the layers are quantised; embeddings, heads, norms and biases keep the model's dtype. Every product is
that of the dequantised weight, whatever the batch: a row's log-probs are the same in sampling, scoring and training.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf import console
from rlhf.config.options import EngineOptions, FrozenOptions, Quantize
from rlhf.distributed import collectives
from rlhf.errors import UserError

WHOLE = ("lm_head", "embed_out", "score")
"""heads, which are not quantised: their logits are the result"""
BLOCK = 64
"""weights of a row that share a scale in 4 bits"""
BITS = {"nf4": 4 + 8 / BLOCK + 32 / (256 * BLOCK), "fp4": 4 + 8 / BLOCK + 32 / (256 * BLOCK)}
"""of a weight, with its share of the scales: 8 bits a block, and 32 for 256 blocks"""
FLAGS = ("hf_quantizer", "quantization_method", "is_quantized")
"""attributes with which transformers would refuse to save or move the model; PEFT needs `is_loaded_in_4bit`"""


def require_possible(options: EngineOptions) -> None:
    """Raises: UserError for options with which a quantised model cannot be trained, or without bitsandbytes."""
    if options.quantize == "none":
        return
    subject = f"--quantize {options.quantize}"
    if options.adapter is None:
        raise UserError(f"{subject}: quantised weights cannot be trained; add an adapter, as --adapter lora")
    refused = {
        "--zero-stage 3": options.zero_stage == 3,
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--torch-compile": options.torch_compile,
    }
    for name in (name for name, requested in refused.items() if requested):
        raise UserError(f"{subject}: got it with {name}, which needs weights in the compute dtype; remove one")
    require_installed(subject)


def require_possible_frozen(options: FrozenOptions, name: str) -> None:
    """Raises: UserError for options with which a quantised model cannot be used, or without bitsandbytes.

    name: of the model's section of options
    """
    if options.quantize in (None, "none"):
        return
    subject = f"--quantize {options.quantize}"
    other = "--offload" if options.offload else "--zero-stage 3" if options.zero_stage == 3 else ""
    if other:
        raise UserError(f"{name}: {subject}: got it with {other}, expected whole weights on every device; remove one")
    require_installed(subject)


def require_installed(subject: str) -> None:
    """Raises: UserError without bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{subject}: the package bitsandbytes is not installed; pip install 'rlhf-pipeline[quantize]'")


def load_options(kind: Quantize, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Arguments of `from_pretrained` that load a model quantised, straight to its device."""
    if kind == "none":
        return {}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=list(WHOLE),
    )
    return {"quantization_config": config, "device_map": {"": device}}


def complete(model: PreTrainedModel, path: str, kind: Quantize) -> None:
    """Make a loaded model one that computes, trains and is saved like any other, and report its size.

    Raises: UserError if none of its matrices was quantised, or the device cannot compute with one of them.
    """
    import bitsandbytes as bnb

    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            # On CPUs with AVX512-BF16 bitsandbytes 0.50 would repack the weights in the first pass without gradients,
            # round their scales to bf16, and from then on give no gradient to what comes before the layer.
            layer.support_avx512bf16_for_cpu = False
    for flag in FLAGS:
        if hasattr(model, flag):
            delattr(model, flag)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        vars(config).pop("quantization_config", None)
    layers = quantized_layers(model)
    if not layers:
        raise UserError(
            f"model '{path}': --quantize {kind}: a {model.config.model_type} has no linear layers that bitsandbytes "
            "quantises; remove the option"
        )
    if collectives.local_device().type == "cpu":
        for name, layer in layers.items():
            if layer.in_features % BLOCK:  # bitsandbytes 0.50 would multiply by the scales of other blocks
                raise UserError(
                    f"model '{path}': --quantize {kind}: {name} has rows of {layer.in_features} weights, expected a "
                    f"multiple of {BLOCK} on a CPU; leave --quantize out"
                )
    count = sum(layer.in_features * layer.out_features for layer in layers.values())
    unquantized = sum(weight.numel() for weight in model.parameters() if weight.is_floating_point())
    size = sum(weight.nbytes for weight in model.parameters())
    console.say(
        f"model '{path}': {count / 1e6:.4g} of {(count + unquantized) / 1e6:.4g} million weights in {kind}, "
        f"{size / 1e9:.3g} GB in place of {(count + unquantized) * model.dtype.itemsize / 1e9:.3g}"
    )


def quantizable(model: nn.Module, wrapped: bool) -> list[int]:
    """Number of weights in each matrix that quantising would store in few bits.

    wrapped: the model has an adapter, whose own matrices are trained
    """
    return [
        layer.weight.numel()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and not name.endswith(WHOLE)
        and not (wrapped and layer.weight.requires_grad)
    ]


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The quantised layers by name; empty for a model that is not quantised."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "source_cls")}


def dequantized_weight(layer: Any) -> Tensor:
    """The matrix of a quantised layer, [out, in]."""
    import bitsandbytes as bnb

    weight: Tensor = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


class _Dequantized(nn.Module):
    """In place of a quantised layer, one whose weight is dequantised when it is read, and on the CPU in a state."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._layer, self._dtype = (layer,), dtype  # in a tuple, so that it is no submodule
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.register_state_dict_post_hook(_add_weight)

    @property
    def weight(self) -> Tensor:
        return dequantized_weight(self._layer[0]).to(self._dtype)


def _add_weight(layer: _Dequantized, state: dict[str, Tensor], prefix: str, _: object) -> None:
    state[f"{prefix}weight"] = layer.weight.to("cpu")


@contextlib.contextmanager
def dequantized(model: PreTrainedModel) -> Iterator[list[str]]:
    """Inside, every quantised layer has a `weight` of the model's dtype, for its state and for merging adapters.

    Yields the names of layers that store the transposed matrix in a file (GPT-2's Conv1D).
    """
    layers = quantized_layers(model)
    try:
        for name, layer in layers.items():
            model.set_submodule(name, _Dequantized(layer, model.dtype))
        yield [name for name, layer in layers.items() if issubclass(layer.source_cls, Conv1D)]
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
