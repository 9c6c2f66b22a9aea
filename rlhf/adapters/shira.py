"""SHiRA: a few weights of every matrix, chosen at random, are trained (arXiv 2406.13175), by peft."""

from peft import ShiraConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 3e-4
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.51"""


class Config(Targets):
    r: int = Field(32, ge=1)
    """as many weights of a layer as LoRA of this rank has: r * (inputs + outputs)"""
    random_seed: int = 42
    """seed of the choice, which is not saved"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0."""
    options = ShiraConfig(r=config.r, random_seed=config.random_seed, target_modules=config.target_modules)
    return PeftAdapter(options, LEARNING_RATE)
