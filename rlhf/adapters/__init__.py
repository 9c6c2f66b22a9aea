"""One parameter-efficient method a file: `Config`, and the two functions of a `Method`."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf import plugins

FOLDER = __name__


class Adapted(Protocol):
    """What the pipeline asks of a wrapped model. It is an `nn.Module` with the forward pass and the attributes of the
    model inside, such as `config`. Only what the method trains requires gradients. The names are those of peft."""

    def get_base_model(self) -> PreTrainedModel:
        """The model inside, whose weights the method may have replaced."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Inside the block the model computes what it computed before it was wrapped."""


class Method(Protocol):
    """What the pipeline asks of a file."""

    def build(self, config: Any, model: PreTrainedModel) -> Adapted:
        """`model`, wrapped; until the first step it computes what `model` computed."""

    def merged_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights to save, by the names that transformers has for them: `state`, those of `get_base_model()` on
        the CPU, with the adapter merged in. Every rank calls it, and all but rank 0 with an empty `state`."""


def method(spec: str) -> Method:
    """The file that `spec` names. Raises: UserError for an unknown name or option, or a function that it lacks."""
    plugins.options(FOLDER, spec)
    name, _ = plugins.parse_spec(spec)
    found: Any = plugins.find(FOLDER, name)
    return plugins.conforming(found, Method, name)


def wrap(model: Any, spec: str | None) -> Any:
    """`model` with the adapter that `spec` names, or as it is.

    Raises: UserError as of `method`, or for a wrapped model that lacks a method of `Adapted`.
    """
    if spec is None:
        return model
    return plugins.conforming(method(spec).build(plugins.options(FOLDER, spec), model), Adapted, spec)
