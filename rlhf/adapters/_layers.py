"""What peft lacks of some methods, each in a subclass of `PeftAdapter`. The methods' options are in `_table`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.adapters._peft import PeftAdapter
from rlhf.config.options import EngineOptions
from rlhf.distributed.zero3 import gather_weights
from rlhf.errors import UserError


class LNTuning(PeftAdapter):
    """peft knows the names of the layers for few model types; here their class says it."""

    def options_for(self, model: PreTrainedModel) -> Any:
        options = super().options_for(model)
        options.target_modules = [name for name, _ in _norms(model)]
        return options

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """peft copies the layers."""
        return gather_weights([weight for _, norm in _norms(model) for weight in norm.parameters()])

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The copy replaces the layer. Rows of new tokens are another method's."""
        if not hasattr(layer, "ln_tuning_layers"):
            return super().merged_layer(layer)
        trained = layer.ln_tuning_layers[layer.active_adapters[0]]
        return {name: weight.detach().cpu() for name, weight in trained.named_parameters()}


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers that have weights, by name."""
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None:
            yield name, module


class LoHa(PeftAdapter):
    """peft takes the sizes of the updates from the weights themselves."""

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError under ZeRO-3, and as every method of peft."""
        super().check(options)
        if options.zero_stage == 3:
            raise UserError("adapter loha: got --zero-stage 3, expected 0, 1 or 2: peft needs whole weights")


class TrainableTokens(PeftAdapter):
    """peft copies rows of the embeddings; those of sharded weights it would copy on CUDA only."""

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return gather_weights(model.get_input_embeddings().parameters())
