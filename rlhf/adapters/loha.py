"""LoHa: updates that are the Hadamard product of two low-rank matrices (FedPara, arXiv 2108.06098), by peft."""

from peft import LoHaConfig
from pydantic import Field

from rlhf.adapters._peft import PeftAdapter, Targets
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError

LEARNING_RATE = 5e-4
"""a product of four matrices, one of which starts at 0, learns more slowly than LoRA: peft's method_comparison
(Llama-3.2-3B) has accuracy 0.39 at 1e-4, LoRA 0.48"""


class Config(Targets):
    r: int = Field(16, ge=1)
    """rank of the two matrices; the update has a rank of up to r * r"""
    alpha: int = Field(32, ge=1)
    """the update is scaled by alpha / r"""


def build(config: Config) -> "LoHa":
    """The update starts at 0."""
    return LoHa(LoHaConfig(r=config.r, alpha=config.alpha, target_modules=config.target_modules), LEARNING_RATE)


class LoHa(PeftAdapter):
    """peft takes the sizes of the updates from the weights themselves."""

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError under ZeRO-3, and as every method of peft."""
        super().check(options)
        if options.zero_stage == 3:
            raise UserError("adapter loha: got --zero-stage 3, expected 0, 1 or 2: peft needs whole weights")
