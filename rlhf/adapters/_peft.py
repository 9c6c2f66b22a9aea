"""Wrap, disable and merge for every method of peft that changes layers. A method's file or row has only its options."""

import contextlib
import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from peft import PeftConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.options import EngineOptions
from rlhf.distributed.zero3 import gather_weights, library_support
from rlhf.errors import UserError
from rlhf.models.adapter_files import merged_weights, method_name, tuner_layers


class PeftAdapter:
    """The adapter of any config of peft whose tuner wraps layers and can merge them."""

    def __init__(self, options: PeftConfig, learning_rate: float | None = None) -> None:
        self._options = options
        self.learning_rate = learning_rate

    def wrap(self, model: PreTrainedModel) -> None:
        # peft changes the model in place, and writes the names of the modules into the options.
        options = self.options_for(model)
        try:
            with self.gathered(model):
                get_peft_model(model, options, autocast_adapter_dtype=False)
        except (ValueError, TypeError, LookupError, re.error) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"adapter {method_name(options)}, {model.config.model_type} model: {reason}") from None

    def check(self, options: EngineOptions) -> None:
        """Raises: UserError for the compiler, with which only LoRA has been tested."""
        refuse_compiler(options, method_name(self._options))

    def options_for(self, model: PreTrainedModel) -> Any:
        """A copy of the options, completed for `model`."""
        return copy.deepcopy(self._options)

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """A context in which peft can read the weights of `model` that it needs to wrap it."""
        return library_support(model)

    @contextlib.contextmanager
    def disabled(self, model: PreTrainedModel) -> Iterator[None]:
        layers = [layer for _, layer in tuner_layers(model)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """peft merges each layer in fp32, one after the other; the layer then gets its own weights back."""
        layers = tuner_layers(model)
        added = re.compile("|".join(rf"{re.escape(name)}\.(?!base_layer\.)" for name, _ in layers))
        merged = {_own_name(name): value for name, value in state.items() if not added.match(name)}
        for name, layer in layers:
            with gather_weights(layer.parameters()):
                for parameter, value in self.merged_layer(layer).items():
                    merged[_own_name(f"{name}.{parameter}")] = value
        return merged

    def merged_layer(self, layer: Any) -> dict[str, Tensor]:
        """The merged weights of one layer by their names in it, on the CPU, in the dtype of the layer's own weights."""
        dtypes = {name: weight.dtype for name, weight in layer.get_base_layer().named_parameters()}
        return {name: value.to("cpu", dtypes[name]) for name, value in merged_weights(layer).items()}


class TrainableTokens(PeftAdapter):
    """peft copies rows of the embeddings; those of sharded weights it would copy on CUDA only."""

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return gather_weights(model.get_input_embeddings().parameters())


def refuse_compiler(options: EngineOptions, method: str) -> None:
    """Raises: UserError for the option --torch-compile."""
    if options.torch_compile:
        raise UserError(f"adapter {method}: got --torch-compile, which has been tested with lora only; leave it out")


def _own_name(name: str) -> str:
    """The name that the weight had before wrapping."""
    return ".".join(part for part in name.split(".") if part != "base_layer")
