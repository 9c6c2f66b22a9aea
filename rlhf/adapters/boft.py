"""BOFT: weights times products of sparse orthogonal matrices, as in a butterfly network (arXiv 2311.06243), by peft."""

import contextlib
from collections.abc import Iterator

import torch
from peft import BOFTConfig
from peft.tuners.boft.layer import get_fbd_cuda
from pydantic import Field
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter, Targets
from rlhf.errors import UserError

LEARNING_RATE = 1e-3
"""ten times that of OFT, whose blocks have 64 times as many weights: at 1e-4 peft's method_comparison (Llama-3.2-3B)
has accuracy 0.34, OFT 0.49"""


class Config(Targets):
    boft_block_size: int = Field(4, ge=2)
    """rows of each orthogonal block; it must divide the inputs of every layer"""
    boft_n_butterfly_factor: int = Field(1, ge=1)
    """number of sparse matrices that are multiplied; 1 = OFT with a learned scale of each output. More need peft's CUDA
    extension"""


def build(config: Config) -> "BOFT":
    """Every block starts as the identity. Raises: UserError without the CUDA extension, where peft would silently use a
    single factor."""
    if config.boft_n_butterfly_factor > 1 and get_fbd_cuda() is None:
        raise UserError(
            f"adapter boft: got boft_n_butterfly_factor {config.boft_n_butterfly_factor}, expected 1: peft's CUDA "
            "extension cannot be built here (it needs a GPU, nvcc and ninja)"
        )
    options = BOFTConfig(
        boft_block_size=config.boft_block_size,
        boft_n_butterfly_factor=config.boft_n_butterfly_factor,
        target_modules=config.target_modules,
    )
    return BOFT(options, LEARNING_RATE)


class BOFT(PeftAdapter):
    """peft reads the elements of its permutations, which the plan's models of the meta device do not have."""

    @contextlib.contextmanager
    def gathered(self, model: PreTrainedModel) -> Iterator[None]:
        with torch.device("cpu"), super().gathered(model):
            yield
