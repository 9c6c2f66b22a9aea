"""Rows of the embeddings and the head for tokens that a model has not been trained on."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.distributed.zero3 import gather_weights


def add(model: PreTrainedModel, size: int) -> None:
    """Make the embeddings and the head `size` rows long. Each new row is the mean of the others."""
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(size, mean_resizing=False)
    for weight in _matrices(model):
        with torch.no_grad(), gather_weights([weight], changed=True):
            weight[rows:] = weight[:rows].float().mean(0)


def set_to_means(model: PreTrainedModel, pieces: Mapping[int, list[int]]) -> None:
    """Set the row of each new id to the mean of the rows of its pieces, in the embeddings and in the head.

    pieces: for each new id, the ids that its text had before
    """
    for weight in _matrices(model):
        with torch.no_grad(), gather_weights([weight], changed=True):
            for new, old in pieces.items():
                weight[new] = weight[old].float().mean(0)


def _matrices(model: PreTrainedModel) -> list[Tensor]:
    """The weights of the embeddings and the head, each once: they may be tied."""
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    return list({id(weight): weight for layer in layers for weight in layer.parameters()}.values())


def train(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Beside an adapter, train the rows `ids` too, by PEFT's trainable tokens: of the embeddings, and of a head of its
    own. The other rows stay frozen."""
    from peft import TrainableTokensConfig, get_peft_model  # takes more than a second, and most runs add no tokens
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    layers = [embeddings] if head is None or tied else [embeddings, head]
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    config = TrainableTokensConfig(token_indices=sorted(ids), target_modules=names)
    get_peft_model(model, config, autocast_adapter_dtype=False)
    for weight in trained:  # PEFT freezes whatever is not of its newest adapter
        weight.requires_grad_()
    wrapper = model.get_output_embeddings()
    if isinstance(wrapper, TrainableTokensLayer):  # it multiplies by the weight itself, without the layer and its hooks
        for hook in wrapper.get_base_layer()._forward_hooks.values():
            wrapper.register_forward_hook(hook)


def fold(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` of a model with the trained rows in the matrices that they belong to, by the matrices' own names."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "trainable_tokens_delta")}
    if not layers or not state:
        return state
    folded = {name: value for name, value in state.items() if ".trainable_tokens_" not in name}
    for name, layer in layers.items():
        source = layer.tied_adapter or layer
        delta = source.trainable_tokens_delta["default"].detach()
        key = f"{name}.base_layer.weight"
        weight = folded.pop(key).clone()
        weight[source.token_indices["default"]] = delta.to(weight)
        folded[f"{name}.weight"] = weight
    return folded
