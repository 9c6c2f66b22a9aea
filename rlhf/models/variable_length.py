"""Attention of packed rows on GPUs, by kernels for rows of any length, so that no padding is computed.

A test on random numbers decides at the first call what this machine supports: torch's flash attention for rows whose
tokens see all tokens before them, flex attention for pairs that share a prompt. Without them, rows of similar length
attend as padded batches (rlhf/models/packing.py). None of this has run on a GPU.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from rlhf.types import to_device

PROBE = (7, 12, 5, 11)
"""lengths of the rows on which a kernel is tested"""


class Rows:
    """Which of N packed tokens see which: those before them in their row, with one exception.

    lengths [B] on the CPU. branch [N] on the CPU: tokens of branch 2 do not see those of branch 1; None: no exception
    """

    def __init__(self, lengths: Tensor, branch: Tensor | None, device: torch.device) -> None:
        self.device, self.longest, self.tokens = device, int(lengths.max()), int(lengths.sum())
        self.plain = branch is None
        self._lengths, self._branch = lengths, branch

    @functools.cached_property
    def ends(self) -> Tensor:
        """[B + 1] int32, the number of tokens before each row, and of all rows."""
        return to_device(F.pad(self._lengths.cumsum(0), (1, 0)).int(), self.device)

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        number = torch.arange(len(self._lengths)).repeat_interleave(self._lengths)
        row, branch = (to_device(number if x is None else x, self.device) for x in (number, self._branch))
        plain = self.plain

        def visible(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
            before = (row[i] == row[j]) & (j <= i)
            return before if plain else before & ~((branch[i] == 2) & (branch[j] == 1))

        return create_block_mask(visible, None, None, self.tokens, self.tokens, device=self.device)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor | None:
    """softmax(scale q k^T) v of packed rows. q [1, heads, N, d], k and v [1, fewer or as many heads, N, d] ->
    [1, N, heads, d]; None: there is no kernel for it on this device."""
    if q.device.type == "cpu" or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    for kernel, supported in ((flash, rows.plain), (flex, True)):
        if supported and works(kernel, q.device, q.dtype, q.shape[-1]):
            return kernel(q, k, v, rows, scale)
    return None


def flash(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """`attend` by torch's flash attention, for rows without an exception; bf16 or fp16."""
    q_rows, k_rows, v_rows = (x[0].transpose(0, 1) for x in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # in torch 2.11 heads share keys without it
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    attended = varlen_attn(q_rows, k_rows, v_rows, rows.ends, rows.ends, rows.longest, rows.longest, **options)
    assert isinstance(attended, Tensor)
    return attended[None]


def flex(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """`attend` by flex attention, for any rows."""
    attended: Tensor = flex_kernel()(q, k, v, block_mask=rows.block_mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@functools.cache
def flex_kernel() -> Callable[..., Any]:
    """Flex attention as one kernel; uncompiled it would compute all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def works(kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `kernel` is right on this device, for heads of `width` numbers, forward and backward."""
    if device.type != "cuda":
        return False
    from torch._dynamo.exc import TorchDynamoException

    lengths, generator = torch.tensor(PROBE), torch.Generator().manual_seed(0)
    rows = Rows(lengths, None, device)
    qkv = [torch.randn(1, heads, rows.tokens, width, generator=generator) for heads in (4, 2, 2)]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in qkv)
    try:
        with torch.enable_grad():
            attended = kernel(q, k, v, rows, width**-0.5)
            gradients = torch.autograd.grad(attended.float().square().sum(), (q, k, v))
            expected = reference(q, k, v, lengths, width**-0.5)
            wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    except (RuntimeError, ValueError, AssertionError, ImportError, TorchDynamoException):
        return False
    pairs = zip((attended, *gradients), (expected, *wanted), strict=True)
    share = 1e-2 if dtype == torch.float32 else 0.1  # far above rounding, far below what a wrong mask leaves
    return all(bool((x - y).float().norm() < share * y.float().norm()) for x, y in pairs)


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """`attend` row by row, by torch's attention."""
    rows = zip(*(x.split(lengths.tolist(), 2) for x in (q, k, v)), strict=True)
    each = [
        F.scaled_dot_product_attention(q_row, k_row, v_row, is_causal=True, scale=scale, enable_gqa=True)
        for q_row, k_row, v_row in rows
    ]
    return torch.cat(each, 2).transpose(1, 2)
