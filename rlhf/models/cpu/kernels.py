"""Operations for CPUs in C++ (cpp/): one new token a row, and attention of rows that lie one after the other.

Measured with a model of 135M in bf16 on two cores (Xeon with AMX), 16 rows: the products of a decode step take 14 ms
where oneDNN takes 17 with weights in an order of its own, a second copy of all of them; attention takes 3 where
products and a compiled softmax take 8. In training, 8 rows of 100 to 370 tokens, attention takes 9 ms a layer, both
passes, where rows gathered for products and torch's kernel take 22.
"""

import functools
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """x [..., K] times each weight [N_i, K], transposed, plus its bias [N_i], beside each other: [..., sum of N_i].

    biases: one a weight, or none. Only where `for_one_token` says so.
    """
    found: Tensor = torch.ops.rlhf.products(x, weights, biases)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v of one token a row. q [B, heads, 1, d], k and v [B, fewer or as many heads, S, d], seen
    bool [B or 1, 1, 1, S] -> [B, 1, heads, d]. Only where `for_one_token` says so."""
    found: Tensor = torch.ops.rlhf.attend(q, k, v, seen, scale)
    return found


def attend_rows(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
    """The same of all tokens of rows one after the other, each of which sees what stands before it in its row.
    q [1, heads, N, d], k and v [1, fewer or as many heads, N, d] -> [1, N, heads, d]. Only where `for_rows` says so.

    spans: of each row [B, 4] long: its first token of N; c and s: tokens from s on do not see those from c to there,
    counted in the row; its length.
    """
    found: Tensor = _Rows.apply(q, k, v, spans, scale)
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, spans)
        ctx.scale = scale
        found: Tensor = torch.ops.rlhf.attend_rows(q, k, v, spans, scale)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.rlhf.attend_rows_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


def fits(*operands: Tensor) -> bool:
    """Whether operands of such a dtype and size, of their last dimension, can be multiplied."""
    return all(x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0) for x in operands)


@functools.cache
def for_one_token(dtype: torch.dtype) -> bool:
    """Whether `products` and `attend` do what they should on this machine. The first call compiles them, which the
    disk remembers."""
    if dtype not in (torch.float32, torch.bfloat16) or not _compiled("one_token.cpp"):
        return False
    x, weight, q, k, v = _drawn(dtype, (3, 1, 40), (50, 40), (2, 6, 1, 40), (2, 2, 21, 40), (2, 2, 21, 40))
    seen = torch.arange(21).expand(2, 1, 1, 21) > 2
    try:
        found = products(x, [weight], []), attend(q, k, v, seen, 0.2)
    except RuntimeError:  # oneDNN has no block products for this CPU
        return False
    expected = F.scaled_dot_product_attention(q, k, v, seen, scale=0.2, enable_gqa=True)
    return _close(found[0], x @ weight.mT) and _close(found[1], expected.transpose(1, 2))


@functools.cache
def for_rows(dtype: torch.dtype) -> bool:
    """Whether `attend_rows` does what it should on this machine: only in bf16. The first call compiles it."""
    if dtype != torch.bfloat16 or not _compiled("rows.cpp"):
        return False
    q, k, v = _drawn(dtype, (1, 6, 90, 40), (1, 2, 90, 40), (1, 2, 90, 40))
    try:
        found = attend_rows(q, k, v, torch.tensor([[0, 90, 90, 90]]), 0.2)
    except RuntimeError:
        return False
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    return _close(found, expected.transpose(1, 2))


def _drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-4 if found.dtype == torch.float32 else 0.1)


@functools.cache
def _compiled(name: str) -> bool:
    if platform.machine() != "x86_64":
        return False
    from torch._inductor.codecache import CppCodeCache

    folder = Path(__file__).parent / "cpp"
    source = "\n".join((folder / part).read_text(encoding="utf-8") for part in ("blocks.h", name))
    try:
        CppCodeCache.load(source, device_type="cpu", needs_vec_isa=True, extra_flags=("-ftree-loop-vectorize",))
    except (RuntimeError, OSError) as error:
        told = [line for line in str(error).splitlines() if "error: " in line] or [str(error).strip()]
        warnings.warn(f"{name} does not compile, so what it does takes longer: {told[0]}", stacklevel=2)
        return False
    if name == "one_token.cpp":
        torch.library.register_fake("rlhf::products", products_shape)
        torch.library.register_fake("rlhf::attend", lambda q, *_: q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3]))
    return True


def products_shape(x: Tensor, weights: list[Tensor], _: list[Tensor]) -> Tensor:
    """What `products` gives, for a compiler: its numbers are not looked at."""
    return x.new_empty(*x.shape[:-1], sum(map(len, weights)))
