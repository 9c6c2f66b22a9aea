"""P-tuning: embeddings before every row, computed by a learned MLP (arXiv 2103.10385), by peft. It cannot be
merged."""

from peft import PromptEncoderConfig
from pydantic import Field

from rlhf.adapters._virtual import VirtualTokens
from rlhf.config import Config as Base

LEARNING_RATE = 1e-4
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.35"""


class Config(Base):
    num_virtual_tokens: int = Field(20, ge=1)
    """number of embeddings"""
    encoder_hidden_size: int | None = Field(None, ge=1)
    """width of the MLP; none = that of the model"""


def build(config: Config) -> VirtualTokens:
    """The embeddings start at random, so the model does not compute what it did before."""
    options = PromptEncoderConfig(
        num_virtual_tokens=config.num_virtual_tokens,
        encoder_hidden_size=config.encoder_hidden_size,  # type: ignore[arg-type]  # peft fills in the model's
    )
    return VirtualTokens(options, LEARNING_RATE)
