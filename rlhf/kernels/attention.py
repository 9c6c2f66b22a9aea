"""Attention on CPUs: the results of transformers' sdpa, computed by matrix products where torch's kernels are slow.

Those cases are the backward pass in bf16, and single tokens. Measured with the heads of a model of 135M, two cores:
gradients of 8 rows of 320 tokens take 17 ms where torch takes 31 (Xeon with AMX), and one new token of 16 rows a fifth
(Zen 4).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.distributed import collectives
from rlhf.kernels import cpu_operations, memory

NAME, APART, ONE_TOKEN = "cpu_products", "cpu_products_apart", "cpu_products_one_token"
"""names of our attention in transformers: this module; the same between compiled layers, with the kernels for packed
rows; with the kernels for one token"""
OneToken = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], Tensor]
"""as `one_token`"""
BLOCK = 128
"""queries computed at once; keys after the last of them are not computed"""


def install(lm: PreTrainedModel) -> None:
    """Set this attention for `lm`, whose weights are aligned for a CPU. A model whose attention is not sdpa keeps its
    own, unless that is only because its scores are capped (Gemma 2)."""
    device = collectives.local_device()
    if device.type == "cpu":
        memory.align(lm)
    capped = getattr(lm.config, "attn_logit_softcapping", None) is not None
    if lm.config._attn_implementation != ("eager" if capped else "sdpa") or not lm._can_set_attn_implementation():
        return
    fused = _one_token_in_triton(device) if device.type == "cuda" else None
    _register(NAME, partial(attention, single=fused) if fused else attention)
    _register(ONE_TOKEN, _attention_with_kernel)
    lm.set_attn_implementation(NAME)


def installed(lm: PreTrainedModel) -> bool:
    """Whether `install` has set the attention of `lm`, and nothing has replaced it."""
    return lm.config._attn_implementation in (NAME, APART, ONE_TOKEN)


def between_compiled(lm: PreTrainedModel) -> bool:
    """Whether `exclude_from_compiling` has set the attention of `lm`."""
    return lm.config._attn_implementation == APART


def exclude_from_compiling(lm: PreTrainedModel) -> None:
    """Compiled layers of `lm` call attention uncompiled, between compiled graphs."""
    if installed(lm):
        _register(APART, _uncompiled_attention())
        lm.set_attn_implementation(APART)


def _register(name: str, attend: Callable[..., object]) -> None:
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)


@functools.cache
def _uncompiled_attention() -> Callable[..., object]:
    return torch.compiler.disable(partial(attention, packed=_attend_rows))  # imports the compiler


@contextlib.contextmanager
def inside(lm: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the attention of `lm` is `name`, which is compiled with its layers."""
    before = lm.config._attn_implementation
    lm.set_attn_implementation(name)
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    layout: Any = None,
    single: OneToken | None = None,
    packed: Callable[[Any, Tensor, Tensor, Tensor, float], Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, on GPUs too.

    q [B, heads, S, d], k and v [B, fewer or as many heads, L, d] -> [B, S, heads, d].
    attention_mask: None = causal; bool, True if one of S tokens sees one of L; or an additive mask. [B, 1, S, L]
    layout: of packed rows (rlhf/models/packing.py); it has their masks.
    single: a replacement of `one_token`, used if S is 1 and the mask is None or bool.
    packed: a replacement of `layout.attend`.
    options: `softcap` bounds the scores, c tanh(scores / c) (Gemma 2, arXiv 2408.00118, section 2)
    """
    cap = options.get("softcap") or 0.0
    of_one_token = options.get("position_bias") is None and not dropout
    plain = of_one_token and not cap
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is not None:
        layout.keep(k, v)
        attended = (packed or type(layout).attend)(layout, q, k, v, scale) if plain else None
        if attended is not None:
            return attended, None
        attend = partial(attention, module, dropout=dropout, scaling=scaling, is_causal=is_causal, **options)
        return layout.padded.attend_padded(attend, q, k, v), None
    if of_one_token and q.shape[2] == 1 and (attention_mask is None or attention_mask.dtype == torch.bool):
        return (single or one_token)(q, k, v, attention_mask, scale, cap), None
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if cap:
        return _capped(q, k, v, attention_mask, scale, cap, dropout), None
    learned = q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if plain and learned and causal and q.dtype == torch.bfloat16 and q.shape[2] == k.shape[2]:
        outputs: Tensor = _Causal.apply(q, k, v, attention_mask, scale)
        return outputs.transpose(1, 2).contiguous(), None
    more: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    return sdpa_attention_forward(module, q, k, v, attention_mask, **more, **options)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float, dropout: float) -> Tensor:
    """Attention whose scores are capped, by products: torch's own has no cap. Arguments as of `attention`."""
    shared = q.unflatten(1, (k.shape[1], -1))  # [B, heads of k, heads of q for each, S, d]
    scores = torch.tanh(shared @ k[:, :, None].mT * scale / cap) * cap
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    else:
        mask = mask[:, :, None, :, : k.shape[2]]
    scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout)
    return (weights @ v[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous()


def one_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    """q [B, heads, 1, d], k and v [B, fewer or as many heads, L, d], mask bool [B, 1, 1, L] -> [B, 1, heads, d]

    cap: c tanh(scores / c) in place of the scores; 0: none
    """
    shared = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, heads of k, heads of q for each, d]
    scores = (k @ shared.mT).mT.float() * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[..., : k.shape[2]], -torch.inf)
    attended = scores.softmax(-1).to(v.dtype) @ v
    return attended.flatten(1, 2)[:, None]


@functools.cache
def _one_token_in_triton(device: torch.device) -> OneToken | None:
    """`one_token` that reads the keys that are seen only, if Triton is there and random numbers find it right."""
    try:
        from triton.errors import TritonError

        from rlhf.kernels import one_token_triton
    except ImportError:
        return None
    try:
        if all(map(partial(_agrees, one_token_triton.attend, device), (torch.float32, torch.bfloat16, torch.float16))):
            return one_token_triton.attend
        reason = "its results are wrong"
    except (RuntimeError, TritonError) as error:
        reason = str(error).strip().splitlines()[0]
    warnings.warn(
        f"rollouts are slower: Triton's attention of one token is not used on {device}: {reason}", stacklevel=2
    )
    return None


def _agrees(attend: OneToken, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend` is `one_token` on random numbers: rows of unequal length, one with many keys; capped and not."""
    shapes = (3, 8, 1, 40), (3, 2, 300, 40), (3, 2, 300, 40)
    q, k, v = (x.to(device) for x in cpu_operations.random_tensors(dtype, *shapes))
    visible = torch.arange(300, device=device) >= torch.tensor([[2], [299], [150]], device=device)
    mask = visible[:, None, None]
    caps = (0.0, 1.5)
    return all(
        cpu_operations.close(attend(q, k, v, mask, 0.2, cap), one_token(q, k, v, mask, 0.2, cap)) for cap in caps
    )


def _attend_rows(layout: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """`layout.attend`, on a CPU by the kernel if it supports the arguments."""
    alike = q.is_cpu and q.shape[-1] == k.shape[-1] == v.shape[-1]
    if alike and cpu_operations.fits(q, k, v) and cpu_operations.for_rows(q.dtype):
        return cpu_operations.attend_rows(q, k, v, layout.rows.spans, scale)
    attended: Tensor | None = layout.attend(q, k, v, scale)
    return attended


def _attend_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float = 0.0) -> Tensor:
    """`one_token` by the kernel, if it supports the arguments."""
    if mask is None or cap or not cpu_operations.fits(q, k, v):
        return one_token(q, k, v, mask, scale, cap)
    return cpu_operations.attend(q, k, v, mask, scale)


_attention_with_kernel = partial(attention, single=_attend_one)


class _Causal(torch.autograd.Function):
    """O = P V with P = softmax(s Q K^T); with dP = dO V^T and dS = P * (dP - sum_keys dP * P) its gradients are
    dV = P^T dO, dQ = s dS K and dK = s dS^T Q. P is recomputed in blocks of rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        if mask is None:
            return attend(q, k, v, is_causal=True)
        # With a mask torch would compute later keys too, so the rows are split into blocks.
        blocks = ((slice(start, end), slice(end)) for start, end in _blocks(q.shape[2]))
        return torch.cat([attend(q[:, :, i], k[:, :, j], v[:, :, j], mask[:, :, i, j]) for i, j in blocks], 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mask = ctx.saved_tensors
        rows, heads, length, _ = q.shape
        keys, values = _flat(k * ctx.scale, k.shape[1]), _flat(v, k.shape[1])
        dq, dk, dv = torch.empty_like(q), None, None
        for start, end in reversed(list(_blocks(length))):  # the last block has all keys; the others add to the first
            block_k, block_v = keys[:, :end], values[:, :end]
            block_q, grad = (_flat(x[:, :, start:end], k.shape[1]) for x in (q, gradient))
            scores = torch.bmm(block_q, block_k.mT)
            by_head = scores.view(rows, k.shape[1], -1, end - start, end)
            weights = _hide(by_head, mask, start).softmax(-1).view_as(scores)
            change = torch._softmax_backward_data(torch.bmm(grad, block_v.mT), weights, -1, weights.dtype)
            dq[:, :, start:end] = torch.bmm(change, block_k).view(rows, heads, end - start, -1)
            dk, dv = _sum(dk, torch.bmm(change.mT, block_q), start), _sum(dv, torch.bmm(weights.mT, grad), start)
        assert dk is not None and dv is not None
        return dq, dk.mul_(ctx.scale).to(k.dtype).view_as(k), dv.to(v.dtype).view_as(v), None, None


def _sum(total: Tensor | None, part: Tensor, start: int) -> Tensor:
    """A sum in fp32, unless there is only one part."""
    if total is None:
        return part if start == 0 else part.float()
    total[:, : part.shape[1]] += part
    return total


def _flat(x: Tensor, groups: int) -> Tensor:
    """[B, heads, n, d] -> [B * groups, heads / groups * n, d]: heads that share keys are concatenated."""
    return x.reshape(x.shape[0] * groups, -1, x.shape[-1])


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(length, start + BLOCK)) for start in range(0, length, BLOCK))


def _hide(scores: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """Scores of the tokens from `start` on, with -inf for keys that they do not see. [B, groups, heads of each, n,
    L]"""
    size, end = scores.shape[-2:]
    if mask is None:
        scores[..., start:].add_(scores.new_full((size, size), -torch.inf).triu_(1))
        return scores
    block = mask[:, :, None, start : start + size, :end]
    return scores.masked_fill_(~block, -torch.inf) if mask.dtype == torch.bool else scores.add_(block)
