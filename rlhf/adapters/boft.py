"""BOFT: weights times products of sparse orthogonal matrices, as in a butterfly network (arXiv 2311.06243), by peft."""

from peft import BOFTConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-3
"""ten times that of OFT, whose blocks have 64 times as many weights: at 1e-4 peft's method_comparison (Llama-3.2-3B)
has accuracy 0.34, OFT 0.49"""


class Config(Targets):
    boft_block_size: int = Field(4, ge=2)
    """rows of each orthogonal block; it must divide the inputs of every layer"""
    boft_n_butterfly_factor: int = Field(1, ge=1)
    """number of sparse matrices that are multiplied; 1 = OFT"""


def build(config: Config) -> PeftAdapter:
    """Every block starts as the identity."""
    options = BOFTConfig(
        boft_block_size=config.boft_block_size,
        boft_n_butterfly_factor=config.boft_n_butterfly_factor,
        target_modules=config.target_modules,
    )
    return PeftAdapter(options, LEARNING_RATE)
