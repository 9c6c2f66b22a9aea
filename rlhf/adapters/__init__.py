"""Parameter-efficient methods, one per file: `Config`, and the two functions of a `Method`."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf import plugins

FOLDER = __name__


class Adapted(Protocol):
    """What the pipeline requires of a wrapped model. It is an `nn.Module` with the forward pass and the attributes of
    the base model, such as `config`. Only the weights that the method trains require gradients. The names are those of
    peft."""

    def get_base_model(self) -> PreTrainedModel:
        """The base model, whose weights the method may have replaced."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the model computes the same as before wrapping."""


class Method(Protocol):
    """What the pipeline requires of a method's file."""

    def build(self, config: Any, model: PreTrainedModel) -> Adapted:
        """Wrap `model`. The result computes the same as `model` until the first optimizer step."""

    def merged_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights to save, with the adapter merged into them, by their names in transformers. state: the weights of
        `get_base_model()` on the CPU. Every rank calls it; all ranks but 0 have an empty `state`."""


def method(spec: str) -> Method:
    """The method that `spec` names. Raises: UserError for an unknown name or option, or a missing function."""
    plugins.options(FOLDER, spec)
    name, _ = plugins.parse_spec(spec)
    module: Any = plugins.find(FOLDER, name)
    return plugins.conforming(module, Method, name)


def wrap(model: Any, spec: str | None) -> Any:
    """`model` with the adapter that `spec` names; unchanged if `spec` is None.

    Raises: UserError as in `method`, or if the wrapped model lacks a method of `Adapted`.
    """
    if spec is None:
        return model
    return plugins.conforming(method(spec).build(plugins.options(FOLDER, spec), model), Adapted, spec)
