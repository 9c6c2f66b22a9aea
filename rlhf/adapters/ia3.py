"""(IA)^3: learned scales of keys, values and the inputs of feed-forward layers (arXiv 2205.05638), by peft."""

from peft import IA3Config

from rlhf.adapters._peft import PeftAdapter
from rlhf.config import Config as Base
from rlhf.errors import UserError

LEARNING_RATE = 5e-3
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.31 at 1e-4, 0.40 at 1e-3, 0.46 at 5e-3; the paper has 3e-3"""


class Config(Base):
    target_modules: list[str] | None = None
    """layers whose outputs are scaled; none = keys, values and the last feed-forward layer, as peft knows the model"""
    feedforward_modules: list[str] | None = None
    """those of `target_modules` whose inputs are scaled instead"""


def build(config: Config) -> PeftAdapter:
    """All scales start at 1."""
    try:
        options = IA3Config(target_modules=config.target_modules, feedforward_modules=config.feedforward_modules)
    except ValueError as error:
        raise UserError(f"adapter ia3: {error}") from None
    return PeftAdapter(options, LEARNING_RATE)
