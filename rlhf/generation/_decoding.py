"""What makes one token a row cheap on a CPU: weights in the order that its products read.

Measured with a model of 135M in bf16 (Zen 4, two cores, 16 rows): the products of a step take half the time, because
oneDNN otherwise sorts every weight anew for each product.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf.models import compiling, traits


@contextlib.contextmanager
def decoding(lm: PreTrainedModel, rows: int) -> Iterator[None]:
    """Meanwhile `lm` takes single tokens of so many rows quickly; its results are the same up to rounding.

    Weights that lie in parts on the ranks stay as they are.
    """
    model = traits.base(lm)
    with compiling.eager(), _packed(model, rows) if model.device.type == "cpu" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _packed(lm: PreTrainedModel, rows: int) -> Iterator[None]:
    head = lm.get_output_embeddings()  # as wide as the vocabulary: sorting it takes no share of its product
    dtypes = [torch.float32] if torch.backends.mkldnn.is_available() else []
    if dtypes and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.append(torch.bfloat16)
    packed = [
        module
        for module in lm.modules()
        if type(module) is nn.Linear
        and module is not head
        and "forward" not in vars(module)
        and module.weight.dim() == 2  # not a part of it
        and module.weight.dtype in dtypes
    ]
    try:
        for module in packed:
            module.forward = _product(module, rows)  # type: ignore[method-assign]
        yield
    finally:
        for module in packed:
            vars(module).pop("forward", None)


def _product(module: nn.Linear, rows: int) -> Any:
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
    bias = None if module.bias is None else module.bias.detach()
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
