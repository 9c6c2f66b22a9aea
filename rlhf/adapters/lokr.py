"""LoKr: updates that are Kronecker products of small matrices (arXiv 2309.14859), by peft."""

from peft import LoKrConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 3e-3
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.47 with r 32, alpha 64, decompose_factor 4"""


class Config(Targets):
    r: int = Field(32, ge=1)
    """rank of the larger factor, which is whole if it is small"""
    alpha: int = Field(64, ge=1)
    """the update is scaled by alpha / r"""
    decompose_factor: int = Field(4, ge=-1)
    """rows and columns of the smaller factor at most; -1 = near the square root of the layer's"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0."""
    options = LoKrConfig(
        r=config.r, alpha=config.alpha, decompose_factor=config.decompose_factor, target_modules=config.target_modules
    )
    return PeftAdapter(options, LEARNING_RATE)
