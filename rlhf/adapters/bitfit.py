"""BitFit: only the biases are trained (Ben Zaken et al. 2021, arXiv 2106.10199). peft has no such method.

The biases are trained in place, so there is nothing to merge; copies of them as they were make the reference of step 3.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.adapters._peft import refuse_compiler
from rlhf.config import Config as Base
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError

START = "bias_at_start"


class Config(Base):
    """No options."""


class BitFit:
    """The method. Its rate is the largest of the paper's search, 1e-4 to 1e-3: biases are few."""

    learning_rate = 1e-3

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError under ZeRO-3 or the compiler."""
        refuse_compiler(options, "bitfit")
        if options.zero_stage == 3:
            raise UserError("adapter bitfit: got --zero-stage 3, expected 0, 1 or 2: biases must be whole")

    def wrap(self, model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        for module, bias in _biases(model):
            module.register_buffer(START, bias.detach().clone(), persistent=False)
            bias.requires_grad_(True)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UserError(
                f"adapter bitfit, {model.config.model_type} model: it has no biases, expected a model with some, such "
                "as OPT, GPT-2 or Qwen2.5; ia3 trains as few weights"
            )

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        trained = [(bias, bias.data) for _, bias in _biases(model)]
        for module, bias in _biases(model):
            bias.data = module.get_buffer(START)
        try:
            yield
        finally:
            for bias, data in trained:
                bias.data = data

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


def _biases(model: nn.Module) -> Iterator[tuple[nn.Module, torch.nn.Parameter]]:
    for module in model.modules():
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            yield module, bias


def build(_: Config) -> BitFit:
    return BitFit()
