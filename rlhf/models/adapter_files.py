"""Adapters as directories that peft writes and reads: options, and weights without those of the base model.

    adapter_config.json           the options of the method, and the path or hub id of the base model
    adapter_model.safetensors     the adapter's weights; of a scalar model also its head, as `base_model.model.score`
    config.json, tokenizer files  as of the whole model

`AutoPeftModelForCausalLM.from_pretrained` loads a policy, and `AutoPeftModelForSequenceClassification.from_pretrained`
with `num_labels=1` a scalar model.

Functions import peft themselves: it takes more than a second, and most runs have no adapter.
"""

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.hub.untrusted import ADAPTER_WEIGHTS, is_adapter, with_file
from rlhf.models import virtual_tokens
from rlhf.storage import disk

if TYPE_CHECKING:
    from peft import PeftConfig

PREFIX = "base_model.model."
"""before the names of weights in the file: peft's own modules"""
HEAD_IN_FILE = f"{PREFIX}score.weight"
ONLY = "default"
"""the name of an adapter that is alone on its model, which peft chooses"""
SHARING = ("LORA",)
"""methods of peft of which several adapters on one model are independent"""
OWN_BASE = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
"""initial weights of LoRA, in a user's file or a saved adapter, that change the base model or depend on data"""
UNLIKE = ("base_model_name_or_path", "inference_mode", "task_type", "modules_to_save", "peft_version", "revision")
"""options in which adapters of one method differ"""


ALONE = "its virtual tokens cannot be merged into a model"
"""why prompt tuning and its like end with step 1"""


def base_of(path: str) -> str:
    """The base model of the adapter in a directory; of another model, the model itself. Local paths are absolute.

    Raises: UserError if the file of the adapter does not name its base.
    """
    path = with_file(resolve(path))
    return str(Path(path).resolve()) if Path(path).exists() else path


def read_options(path: str, virtual_tokens: bool = False) -> "PeftConfig":
    """The options of the adapter in a directory. Raises: UserError for virtual tokens, unless they are expected."""
    from peft import PeftConfig

    options = PeftConfig.from_pretrained(path)
    if options.is_prompt_learning and not virtual_tokens:
        raise UserError(
            f"model '{path}': {ALONE}, and no stage trains it further; expected whole weights, as those of its base "
            f"model '{options.base_model_name_or_path}', or another method, as --adapter lora"
        )
    options.modules_to_save = None  # a scalar model has its head beside the backbone
    return options


def on_base(path: str, base: str) -> bool:
    """Whether the model at a path is an adapter on this base model."""
    return is_adapter(Path(path)) and base_of(path) == base


def reason_against_sharing(options: "PeftConfig | None") -> str | None:
    """Why several adapters with these options cannot be on one model; None if they can. None: not a method of peft."""
    if options is None or options.peft_type not in SHARING:
        return "the method does not keep several independent adapters on one model"
    initial: Any = getattr(options, "init_lora_weights", True)
    if isinstance(initial, str) and initial.startswith(OWN_BASE):
        return f"init_lora_weights={initial} gives each adapter a base of its own"
    if getattr(options, "bias", "none") != "none":
        return "it trains biases of the base model"
    return None


def inject(model: PreTrainedModel, name: str, options: "PeftConfig") -> None:
    """Add a new adapter with the name `name` to a model, which may have others. Its weights require gradients."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():  # about several adapters, which are intended
        warnings.simplefilter("ignore", UserWarning)
        inject_adapter_in_model(copy.deepcopy(options), model, adapter_name=name)


def load(model: PreTrainedModel, name: str, path: str) -> None:
    """Add the adapter in a directory to a model that has the output layers of a language model, or has not.

    Raises: UserError if weights of the adapter are missing, unexpected, misshapen or not finite.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    inject(model, name, _without_prefix(read_options(path), model))
    own_prefix = f"{PREFIX}{_inner_prefix(model)}"
    state = {key: value for key, value in load_file(Path(path) / ADAPTER_WEIGHTS).items() if key != HEAD_IN_FILE}
    named = {key.removeprefix(own_prefix): value for key, value in state.items()}
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    wrong = sorted({*expected} ^ {*named}) or [key for key in named if named[key].shape != expected[key].shape]
    if wrong:
        raise UserError(
            f"adapter '{path}': {len(wrong)} weights are missing, unexpected or have another shape ({wrong[0]}); "
            "expected those of its base model and its options"
        )
    for key, value in named.items():
        if not torch.isfinite(value).all():
            raise UserError(f"adapter '{path}': weight {key} has values that are not finite")
    set_peft_model_state_dict(model, named, adapter_name=name)


def _inner_prefix(model: PreTrainedModel) -> str:
    """The prefix that names in the file have, and names in a backbone without a head have not."""
    return f"{model.base_model_prefix}." if model.base_model is model else ""


def has_head(path: str) -> bool:
    """Whether the adapter in a directory has the head of a scalar model."""
    with safe_open(Path(path) / ADAPTER_WEIGHTS, framework="pt") as tensors:
        return HEAD_IN_FILE in tensors.keys()  # noqa: SIM118  (not a mapping)


def merge(model: PreTrainedModel, path: str) -> None:
    """Add the adapter in a directory to the weights of a model, in fp32. A head or an embedding that has an adapter is
    no longer tied to the other."""
    name = "merged"
    load(model, name, path)
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for layer_name, layer in tuner_layers(model):
        base = layer.get_base_layer()
        for weight_name, value in merged_weights(layer).items():
            weight = base.get_parameter(weight_name)
            if uses[id(weight)] > 1:
                base.register_parameter(weight_name, nn.Parameter(value.to(weight)))
                model.config.tie_word_embeddings = False
            else:
                weight.data.copy_(value)
        model.set_submodule(layer_name, base)
    del model.peft_config
    model.requires_grad_(True)  # peft has frozen it


def merged_weights(layer: Any) -> dict[str, Tensor]:
    """The weights of a layer with its adapter merged into them, in at least fp32, by their names in the base layer. The
    layer itself stays as it was."""
    before = [(weight, weight.data) for weight in layer.parameters()]
    for weight, data in before:
        weight.data = precise(data).clone()
    try:
        layer.merge()
        merged = {name: weight.data for name, weight in layer.get_base_layer().named_parameters()}
        layer.merged_adapters.clear()
    finally:
        for weight, data in before:
            weight.data = data
    return merged


def precise(weight: Tensor) -> Tensor:
    """The weight in fp32, or fp64 if it is in that."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def options_of(model: PreTrainedModel, name: str) -> "PeftConfig":
    """A copy of the options of the adapter `name` of a model, with the names of the modules that it has."""
    return _without_prefix(copy.deepcopy(model.peft_config[name]), model)


def _without_prefix(options: Any, model: PreTrainedModel) -> "PeftConfig":
    """The options with names of modules that match a language model and its backbone alone."""
    if isinstance(getattr(options, "target_modules", None), set):
        prefix = f"{model.base_model_prefix}."  # sorted, the file does not depend on the order of a set
        options.target_modules = sorted(module.removeprefix(prefix) for module in options.target_modules)
    own_options: PeftConfig = options
    return own_options


def same_method(one: "PeftConfig", other: "PeftConfig") -> bool:
    """Whether two adapters have the same weights by shape, and compute the same with them."""
    first, second = ({**options.to_dict(), **dict.fromkeys(UNLIKE)} for options in (one, other))
    first["target_modules"], second["target_modules"] = (sorted(o["target_modules"]) for o in (first, second))
    return bool(first == second)


def save(model: PreTrainedModel, name: str, base: str, directory: Path, head: Tensor | None = None) -> None:
    """Write the adapter `name` of a model into a directory, as peft does.

    base: path or hub id of the model without it; head: of a scalar model, [1, d]
    """
    from peft import get_peft_model_state_dict

    tokens = virtual_tokens.of(model)
    source: Any = model if tokens is None else tokens.held[0]
    options: Any = options_of(source, name)
    options.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
    options.modules_to_save = None if head is None else ["score"]
    own_prefix = f"{PREFIX}{_inner_prefix(model)}" if tokens is None else ""
    weights = get_peft_model_state_dict(source, adapter_name=name, save_embedding_layers=False)
    state = {f"{own_prefix}{key}": value for key, value in weights.items()}
    if head is not None:
        state[HEAD_IN_FILE] = head
    options.base_model_name_or_path = base
    options.inference_mode = True
    options.save_pretrained(str(directory))
    on_cpu = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    disk.save_tensors(on_cpu, directory / ADAPTER_WEIGHTS, {"format": "pt"})


def method_name(options: "PeftConfig") -> str:
    """The name of a method for messages, such as `lora`."""
    return str(options.peft_type).rpartition(".")[2].lower()


def tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of a model that have adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
