"""OFT: weights times orthogonal matrices of blocks (arXiv 2306.07280), by peft."""

from peft import OFTConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-4
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.49, LoRA 0.48 at the same rate"""


class Config(Targets):
    oft_block_size: int = Field(32, ge=2)
    """rows of each orthogonal block; peft takes the nearest divisor of the layer's inputs"""


def build(config: Config) -> PeftAdapter:
    """Every block starts as the identity."""
    options = OFTConfig(r=0, oft_block_size=config.oft_block_size, target_modules=config.target_modules)
    return PeftAdapter(options, LEARNING_RATE)
