"""RandLoRA: learned combinations of random low-rank matrices, an update of full rank (arXiv 2502.00987), by peft."""

from peft import RandLoraConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-4
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.48, as LoRA"""


class Config(Targets):
    r: int = Field(32, ge=1)
    """rank of the random matrices; a larger one needs fewer of them, so there are fewer weights"""
    randlora_alpha: int = Field(640, ge=1)
    """the update is scaled by randlora_alpha / r"""
    projection_prng_key: int = 0
    """seed of the random matrices"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0."""
    options = RandLoraConfig(
        r=config.r,
        randlora_alpha=config.randlora_alpha,
        projection_prng_key=config.projection_prng_key,
        target_modules=config.target_modules,
    )
    return PeftAdapter(options, LEARNING_RATE)
