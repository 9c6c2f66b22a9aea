"""Parameter-efficient methods, one per file: `Config`, its options, and `build(config)`, which returns an `Adapter`."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from peft import PeftConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf import plugins
from rlhf.errors import UserError
from rlhf.models import adapter_files
from rlhf.models.adapter_files import ONLY

FOLDER = __name__


class Adapter(Protocol):
    """What the pipeline requires of a method.

    A method puts its own modules into a model of transformers, which stays the same object. The pipeline calls, trains
    and moves this model as any other; it trains and checkpoints the weights that require gradients. A method has no
    state beside its options: everything else is in the model.
    """

    def wrap(self, model: PreTrainedModel) -> None:
        """Freeze the weights of `model` and add modules with trainable weights of its dtype and device. The model
        computes the same until the first optimizer step."""

    def disabled(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """A context in which the wrapped `model` computes the same as before wrapping, as the reference of step 3."""

    def merged(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights to save, with the adapter merged into them, by the names that they had before wrapping.

        state: all weights of the wrapped `model` by name, not sharded. All ranks call it at the same time; `state` is
        empty on ranks that save nothing.
        """


def open_adapter(spec: str) -> Adapter:
    """The method that `spec` names, with its options.

    Raises: UserError for an unknown name or option, or a member that is missing or has other arguments.
    """
    adapter: Adapter = plugins.build(FOLDER, spec)
    return plugins.conforming(adapter, Adapter, spec)


def peft_options(spec: str, config: PreTrainedConfig) -> PeftConfig | None:
    """The options that peft has of the adapter `spec` on a language model of `config`, which is not loaded; None for a
    method of another library.

    Raises: UserError as `open_adapter`.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        wrap(model, spec)
    return adapter_files.options_of(model, ONLY) if ONLY in getattr(model, "peft_config", {}) else None


def wrap(model: PreTrainedModel, spec: str | None) -> PreTrainedModel:
    """`model` itself, wrapped by the adapter that `spec` names; unchanged if `spec` is None.

    Raises: UserError as `open_adapter`, or if no weight requires gradients after wrapping.
    """
    if spec is not None:
        open_adapter(spec).wrap(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:  # beside quantised weights PEFT makes fp32 ones
            if weight.dtype != model.dtype:
                weight.data = weight.data.to(model.dtype)
        if not trained:
            raise UserError(f"adapter '{spec}': after wrap(model) no weight requires gradients, expected its own ones")
    return model
