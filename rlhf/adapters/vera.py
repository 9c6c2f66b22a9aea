"""VeRA: two learned vectors scale a random low-rank update that all layers share (arXiv 2310.11454), by peft."""

from peft import VeraConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-3
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.35"""


class Config(Targets):
    r: int = Field(256, ge=1)
    """rank of the shared update"""
    projection_prng_key: int = 0
    """seed of the random matrices"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0."""
    options = VeraConfig(
        r=config.r,
        projection_prng_key=config.projection_prng_key,
        target_modules=config.target_modules,
    )
    return PeftAdapter(options, LEARNING_RATE)
