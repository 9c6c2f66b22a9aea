"""C3A: updates of circulant blocks, computed by FFT (arXiv 2407.19342), by peft."""

from peft import C3AConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets

LEARNING_RATE = 0.3
"""peft's method_comparison (Llama-3.2-3B): accuracy 0.49 with blocks of 64. It is large because the update is
divided by the number of a layer's inputs."""


class Config(Targets):
    block_size: int = Field(64, ge=1)
    """rows and columns of a block; it must divide inputs and outputs of every layer. Larger blocks have fewer
    weights"""


def build(config: Config) -> PeftAdapter:
    """The update starts at 0; peft's default is random, and the model would compute something else."""
    options = C3AConfig(block_size=config.block_size, target_modules=config.target_modules, init_weights=True)
    return PeftAdapter(options, LEARNING_RATE)
