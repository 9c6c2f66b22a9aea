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

from rlhf import console
from rlhf.types import to_device

PROBE = (70, 120, 50, 110)
"""lengths of the rows on which a kernel is tested: several blocks, as flex attention has another kernel for few"""
BLOCK = 128
"""tokens that flex attention computes or leaves out together"""


class Rows:
    """Which of N packed tokens see which: those before them in their row, with one exception.

    lengths [B] on the CPU. branch [N] on the CPU: after the common tokens, 0, a row has those of branch 1, then those
    of branch 2, which do not see branch 1; None: no exception
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
    def spans(self) -> Tensor:
        """Of each row, [B, 4] on the CPU: its first token; then, counted in the row, where the tokens of branch 1 begin
        and end, both its length without an exception; and its length."""
        common = other = self._lengths
        if self._branch is not None:
            number = torch.arange(len(self._lengths)).repeat_interleave(self._lengths)
            common, first = (torch.bincount(number[self._branch == i], minlength=len(self._lengths)) for i in (0, 1))
            other = common + first
        return torch.stack([self._lengths.cumsum(0) - self._lengths, common, other, self._lengths], dim=1)

    def _bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token, [N] each: it sees those from the first bound to itself, without those from the second to
        before the third."""
        first, common, other, _ = self.spans.repeat_interleave(self._lengths, 0).T
        hidden = first + common
        return first, hidden, torch.where(torch.arange(self.tokens) >= first + other, first + other, hidden)

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask for flex attention, from the bounds: torch would compute it for all N x N pairs of tokens."""
        from torch.nn.attention.flex_attention import BlockMask

        first, hidden, shown = (to_device(x, self.device) for x in self._bounds())

        def visible(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (first[i] <= j) & (j <= i) & ~((hidden[i] <= j) & (j < shown[i]))

        token = torch.arange(self.tokens, device=self.device)
        counts = self._in_blocks(first, token + 1) - self._in_blocks(hidden, shown)
        rows = F.pad(counts, (0, 0, 0, -self.tokens % BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, BLOCK, blocks]
        whole = (rows == BLOCK).all(1)
        part = (rows > 0).any(1) & ~whole
        return BlockMask.from_kv_blocks(*_table(part), *_table(whole), BLOCK, visible, (self.tokens, self.tokens))

    def _in_blocks(self, start: Tensor, end: Tensor) -> Tensor:
        """How many of the tokens from `start` to before `end`, [N] each, are in each block of tokens. [N, blocks]"""
        block = torch.arange(0, self.tokens, BLOCK, device=self.device)
        return torch.minimum(end[:, None], block + BLOCK).sub_(torch.maximum(start[:, None], block)).clamp_(min=0)


def _table(some: Tensor) -> tuple[Tensor, Tensor]:
    """(how many of each row of `some` are True, their indices, then the others), as a `BlockMask` has them."""
    indices = some.byte().argsort(dim=1, descending=True, stable=True)
    return some.sum(1)[None, None].int(), indices[None, None].int()


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor | None:
    """softmax(scale q k^T) v of packed rows. q [1, heads, N, d], k and v [1, fewer or as many heads, N, d] ->
    [1, N, heads, d]; None: there is no kernel for it on this device."""
    if q.device.type == "cpu" or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    for kernel, supported in ((flash, rows.plain), (flex, True)):
        if supported and works(kernel, q.device, q.dtype, q.shape[-1], (q.shape[1], k.shape[1])):
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
def works(
    kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, width: int, heads: tuple[int, int] = (4, 2)
) -> bool:
    """Whether `kernel` is right on this device, for heads of `width` numbers, forward and backward.

    heads: of queries, and of keys and values. They are those of the model, laid out as a model does, because flex
    attention is compiled for them: what this test compiles serves the model.
    """
    if device.type != "cuda":
        return False
    if kernel is flex:
        console.status("attention of packed rows is compiled: up to a minute")
    lengths, generator = torch.tensor(PROBE), torch.Generator().manual_seed(0)
    rows = Rows(lengths, None, device)
    qkv = [torch.randn(1, rows.tokens, count, width, generator=generator) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (x.to(device, dtype).transpose(1, 2).requires_grad_() for x in qkv)
    try:
        with torch.enable_grad():
            attended = kernel(q, k, v, rows, width**-0.5)
            gradients = torch.autograd.grad(attended.float().square().sum(), (q, k, v))
            expected = reference(q, k, v, lengths, width**-0.5)
            wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    except (RuntimeError, ValueError, AssertionError, ImportError):
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
