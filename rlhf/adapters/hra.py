"""HRA: weights times a chain of Householder reflections (arXiv 2405.17484), by peft."""

from peft import HRAConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 1e-3
"""a reflection is of a vector's direction, so a step turns it by the rate over its length; docs/adapters.md has the
measurement"""


class Config(Targets):
    r: int = Field(8, ge=2, multiple_of=2)
    """reflections of each layer; even, so that they cancel in pairs at the start"""


def build(config: Config) -> PeftAdapter:
    """The reflections start in equal pairs, which cancel."""
    return PeftAdapter(HRAConfig(r=config.r, target_modules=config.target_modules), LEARNING_RATE)
