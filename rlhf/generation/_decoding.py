"""What makes one token a row cheap on a CPU: weights in the order that its products read, and a plain attention.

Measured with a model of 135M in bf16 (Zen 4, two cores, 16 rows): the products of a step take half the time, because
oneDNN otherwise sorts every weight anew for each product; attention of one token takes a fifth.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ONE_TOKEN = "one_token"


@contextlib.contextmanager
def decoding(lm: PreTrainedModel, rows: int) -> Iterator[None]:
    """Meanwhile `lm` takes single tokens of so many rows quickly; its results are the same up to rounding.

    Models whose attention is not sdpa keep theirs; weights that lie in parts on the ranks stay as they are.
    """
    base: Any = lm.get_base_model() if hasattr(lm, "get_base_model") else lm  # type: ignore[operator]
    if base.device.type != "cpu":
        yield
        return
    with _packed(base, rows), _one_token(base):
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


@contextlib.contextmanager
def _one_token(lm: PreTrainedModel) -> Iterator[None]:
    if lm.config._attn_implementation != "sdpa" or not lm._can_set_attn_implementation():
        yield
        return
    AttentionInterface.register(ONE_TOKEN, attention)
    AttentionMaskInterface.register(ONE_TOKEN, sdpa_mask)
    lm.set_attn_implementation(ONE_TOKEN)
    try:
        yield
    finally:
        lm.set_attn_implementation("sdpa")


def attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention; for one new token a row by two batched products.

    q [B, heads, 1, d], k and v [B, fewer or as many heads, L, d], mask bool [B, 1, 1, L] or None -> [B, 1, heads, d].
    """
    if q.shape[2] > 1 or options.get("position_bias") is not None or options.get("softcap") is not None:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **options)
    shared = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, heads of k, heads of q for each, d]
    scores = (shared @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask[..., : k.shape[2]], -torch.inf)
    found = scores.softmax(-1).to(v.dtype) @ v
    return found.flatten(1, 2)[:, None], None
