"""The dtype in which a model computes. `auto` is resolved here, and nowhere else."""

from typing import TypeVar

import torch

from rlhf.config.options import EngineOptions
from rlhf.errors import UserError

E = TypeVar("E", bound=EngineOptions)
BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(options: EngineOptions, device: torch.device) -> torch.dtype:
    """The torch dtype that `options.dtype` means on `device`.

    Raises: UserError for fp16 on a CPU.
    """
    if options.dtype == "fp16" and device.type == "cpu":
        raise UserError("--dtype fp16: the device is a CPU, expected bf16 or fp32 there")
    return _fast_dtype(device) if options.dtype == "auto" else BY_NAME[options.dtype]


def with_dtype(options: E, dtype: torch.dtype) -> E:
    """The options with the dtype that `auto` means. Whoever asks whether the dtype is fp16 needs them."""
    names = {value: name for name, value in BY_NAME.items()}
    return options.model_copy(update={"dtype": names[dtype]})


def _fast_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if major == 7:  # Volta and Turing multiply fp16 fast, and bf16 not at all
            return torch.float16
        return torch.bfloat16 if major >= 8 else torch.float32  # an AMD GPU has 9 or more
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32
