"""Starts of LoRA that need more than the wrapped model: training rows (EVA), or the unquantised weights (LoftQ)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.distributed import collectives
from rlhf.errors import UserError
from rlhf.models.adapter_files import ONLY, tuner_layers
from rlhf.models.quantized import dequantized_weight, quantized_layers


@torch.no_grad()
def set_eva(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> None:
    """Set A of each layer to the directions in which the layer's inputs vary most (EVA, arXiv 2410.07170, with rho 1).

    rows: token ids. Every layer has rank r: the paper can also move rank between layers (rho above 1). B stays 0, so
    the model computes the same.
    Raises: UserError if the rows have too few tokens for the rank.
    """
    model.to(collectives.local_device())  # type: ignore[arg-type]  # the stub of transformers has another signature
    layers = dict(tuner_layers(model))
    activations = _inputs(model, layers, rows)
    directions: dict[int, Tensor] = {}
    for name, layer in layers.items():
        inputs = activations.get(name, [])
        rank, tokens = layer.r[ONLY], sum(map(len, inputs))
        if rank > min(tokens - 1, layer.in_features):
            raise UserError(
                f"adapter lora: init_lora_weights eva: got {tokens} inputs of {layer.in_features} numbers for layer "
                f"{name}, expected more than r = {rank} of both; lower r, or use more rows"
            )
        if id(inputs) not in directions:
            directions[id(inputs)] = _directions(torch.cat(inputs), rank)
        layer.lora_A[ONLY].weight.copy_(directions[id(inputs)])


def _inputs(model: PreTrainedModel, layers: dict[str, Any], rows: Sequence[Sequence[int]]) -> dict[str, list[Tensor]]:
    """The inputs of each layer, [S, d] of each row. Layers with the same inputs, as queries and keys, have one list.

    A row at a time needs no padding, whatever the architecture.
    """
    passing: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments, name=name: passing.update({name: arguments[0]}))
        for name, layer in layers.items()
    ]
    inputs: dict[str, list[Tensor]] = {}
    for row in rows:
        model(input_ids=torch.tensor([row], device=model.device), use_cache=False)
        lists: dict[int, list[Tensor]] = {}
        for name, x in passing.items():
            if id(x) not in lists:
                lists[id(x)] = inputs.setdefault(name, [])
                lists[id(x)].append(x.flatten(0, -2))
            inputs[name] = lists[id(x)]
        passing.clear()
    for hook in hooks:
        hook.remove()
    return inputs


def _directions(x: Tensor, rank: int) -> Tensor:
    """The first principal directions of N inputs, each of length 1. [N, d] -> [rank, d]"""
    centred = x.double() - x.double().mean(0)
    if len(x) > x.shape[1]:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -rank:].flip(1).T
    scores = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -rank:].flip(1)
    return nn.functional.normalize(scores.T @ centred, dim=1)


@torch.no_grad()
def set_loftq(model: PreTrainedModel) -> None:
    """Set A and B of each quantised layer to the best update of rank r of the error that quantising has made: s B A is
    near W - Q (LoftQ, arXiv 2310.08659, algorithm 1 with T = 1, as peft computes it on a quantised model).

    Loads the unquantised weights of the same model for it, on the CPU.
    """
    whole = type(model).from_pretrained(
        model.name_or_path, dtype=model.dtype, trust_remote_code=False, weights_only=True
    )
    quantized = {id(layer) for layer in quantized_layers(model).values()}
    for name, layer in tuner_layers(model):
        base, own = layer.get_base_layer(), whole.get_submodule(name)
        if id(base) not in quantized:  # a head
            continue
        weight: Any = own.weight.T if isinstance(own, Conv1D) else own.weight
        stored = dequantized_weight(base).float()
        u, sizes, v = torch.linalg.svd(weight.to(stored) - stored, full_matrices=False)
        rank = layer.r[ONLY]
        roots = (sizes[:rank] / layer.scaling[ONLY]).sqrt()
        layer.lora_A[ONLY].weight.copy_(roots[:, None] * v[:rank])
        layer.lora_B[ONLY].weight.copy_(u[:, :rank] * roots)
