"""Products with the same input as one product on a GPU, without a copy of a weight.

The weights of a layer that multiply equal widths are rows of one tensor (`join_weights`), which training sees as the
weights that they were. A decode step multiplies by the rows of several of them at once, wherever it finds them next to
each other: ZeRO 1 and 2 move weights to buffers of their own, in which most are neighbours too.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.no_grad()
def join_weights(layer: nn.Module) -> None:
    """Make the weights of the linear modules in `layer`, and their biases, neighbours in memory if they have the same
    width and dtype, and if all are trained or none is."""
    groups: dict[object, list[Tensor]] = {}
    for module in layer.modules():
        if type(module) is nn.Linear:
            for x in module.parameters(recurse=False):
                groups.setdefault((x.shape[1:], x.dtype, x.requires_grad), []).append(x)
    for weights in groups.values():
        rows = torch.cat([weight.detach() for weight in weights]).split([len(weight) for weight in weights])
        for weight, part in zip(weights, rows, strict=True):
            weight.data = part


def adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether each weight begins in memory where the one before it ends."""
    return all(
        x.data_ptr() + x.nbytes == y.data_ptr()
        and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and x.is_contiguous()
        and y.is_contiguous()
        for x, y in pairwise(weights)
    )


@torch.library.custom_op("rlhf::joined_products", mutates_args=())
def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """x [..., K] times each weight [N_i, K], transposed, plus its bias [N_i], concatenated: [..., sum of N_i].

    One product if the weights are neighbours. biases: one a weight, or none
    """
    if adjacent(weights) and adjacent(biases):
        return F.linear(x, _rows(weights), _rows(biases) if biases else None)
    parts = zip_longest(weights, biases)
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)


@products.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(map(len, weights)))


def _rows(weights: Sequence[Tensor]) -> Tensor:
    """Neighbours in memory as one tensor."""
    first = weights[0]
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
