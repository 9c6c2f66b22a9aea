"""Parameter-efficient methods, one per file: `Config`, its options, and `build(config)`, which returns an `Adapter`."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf import plugins
from rlhf.config.options import EngineOptions
from rlhf.errors import UserError
from rlhf.models import adapter_files
from rlhf.models.adapter_files import ONLY

if TYPE_CHECKING:
    from peft import PeftConfig  # importing it takes more than a second

FOLDER = __name__
FULL_RATE = 2e-5
"""learning rate of supervised fine-tuning of all weights. A method that learns at 10 times this rate there learns at 10
times a stage's own default everywhere: of the policy, the reward model and the critic."""
E = TypeVar("E", bound=EngineOptions)


class Adapter(Protocol):
    """What the pipeline requires of a method.

    A method puts its own modules into a model of transformers, which stays the same object. The pipeline calls, trains
    and moves this model as any other; it trains and checkpoints the weights that require gradients. A method has no
    state beside its options: everything else is in the model.
    """

    learning_rate: float | None = None
    """peak rate of supervised fine-tuning that suits the method (`with_own_rates`); None = that of all weights"""
    check: Callable[[EngineOptions], None] | None = None
    """raises a UserError for options of a trained model that exclude the method; called before a model is loaded"""
    tokens_before: int = 0
    """how many virtual tokens it puts before every row. A model with some is saved as an adapter, so `disabled`
    and `merged` are not called"""

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


def peft_options(spec: str, config: PreTrainedConfig) -> "PeftConfig | None":
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
        for weight in trained:  # peft makes some in fp32
            if weight.dtype != model.dtype:
                weight.data = weight.data.to(model.dtype)
        if not trained:
            raise UserError(f"adapter '{spec}': after wrap(model) no weight requires gradients, expected its own ones")
    return model


def virtual_tokens(spec: str | None) -> int:
    """How many virtual tokens the adapter that `spec` names puts before every row."""
    return 0 if spec is None else open_adapter(spec).tokens_before


def require_merging(spec: str | None, stage: str) -> None:
    """Raises: UserError for an adapter that cannot be merged. stage: what needs whole weights"""
    if virtual_tokens(spec):
        raise UserError(
            f"--adapter {spec}: {adapter_files.ALONE}, but {stage} needs whole weights; expected another method, "
            "as lora, or step 1 alone (--steps 1)"
        )


def own_rates(options: EngineOptions) -> dict[str, float]:
    """The default learning rates of a stage for the adapter in its options, by option; empty if it has none."""
    rate = None if options.adapter is None else open_adapter(options.adapter).learning_rate
    if rate is None:
        return {}
    defaults = {name: field.default for name, field in type(options).model_fields.items()}
    return {
        name: float(f"{default * rate / FULL_RATE:.3g}")
        for name, default in defaults.items()
        if name.endswith("learning_rate") and default is not None
    }


def with_own_rates(options: E, user_options: Collection[str]) -> E:
    """`options` with the default learning rates of their adapter, except those that the user has set."""
    rates = {name: rate for name, rate in own_rates(options).items() if name not in user_options}
    return options.model_copy(update=rates)


def describe_rates(options: EngineOptions) -> str:
    """Which learning rates are used and why: `learning rate 0.0002, the default of adapter lora`."""
    name = plugins.parse_spec(str(options.adapter))[0]
    parts = []
    for option, default in own_rates(options).items():
        rate = getattr(options, option)
        reason = f"the default of adapter {name}" if rate == default else f"as set; adapter {name} has {default:g}"
        parts.append(f"{option.replace('_', ' ')} {rate:g} ({reason})")
    return ", ".join(parts) or f"learning rates as without an adapter: adapter {name} has none of its own"
