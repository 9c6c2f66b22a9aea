"""BitFit: only the biases are trained (arXiv 2106.10199)."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.adapters._peft import refuse_compiler
from rlhf.config import Config as Base
from rlhf.config.options import EngineOptions
from rlhf.distributed.zero3 import gather_weights
from rlhf.errors import UserError

LEARNING_RATE = 1e-3
"""the largest of the paper's GLUE runs with BERT (1e-4, 4e-4, 7e-4, 1e-3)"""
START = "bias_start"
"""the frozen copy of a bias"""


class Config(Base):
    """BitFit has no options: it trains every bias."""


def build(config: Config) -> "BitFit":
    """The biases start as they are."""
    return BitFit()


class BitFit:
    """The model's own biases are trained, and each module has a frozen copy of its bias before training."""

    learning_rate = LEARNING_RATE

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError for the compiler: its graphs would keep the biases that `disabled` exchanges."""
        refuse_compiler(options, "bitfit")

    def wrap(self, model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        modules = [module for module in model.modules() if isinstance(getattr(module, "bias", None), nn.Parameter)]
        if not modules:
            raise UserError(
                f"adapter bitfit: got a {model.config.model_type} model without biases, expected one with biases, such "
                "as OPT or GPT-2; use ln_tuning or lora"
            )
        for module in modules:
            bias: nn.Parameter = module.bias  # type: ignore[assignment]
            with gather_weights([bias]):
                module.register_parameter(START, nn.Parameter(bias.detach().clone(), requires_grad=False))
            bias.requires_grad_(True)

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        _swap(model)
        try:
            yield
        finally:
            _swap(model)

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in state.items() if not name.endswith(START)}


def _swap(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, START):
            module.bias, module.bias_start = module.bias_start, module.bias
