"""Operations for CPUs in C++ (cpp/): one new token per row, and attention of packed rows.

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

SOURCES = ("blocks.h", "one_token.cpp", "rows.cpp")
"""in cpp/: what both begin with, and the two kinds of operations"""


def products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """x [..., K] times each weight [N_i, K], transposed, plus its bias [N_i], concatenated: [..., sum of N_i].

    biases: one a weight, or none. Call it only if `for_one_token` is true.
    """
    result: Tensor = torch.ops.rlhf.products(x, weights, biases)
    return result


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v of one token per row. q [B, heads, 1, d], k and v [B, fewer or as many heads, S, d],
    visible bool [B or 1, 1, 1, S] -> [B, 1, heads, d]. Call it only if `for_one_token` is true."""
    result: Tensor = torch.ops.rlhf.attend(q, k, v, visible, scale)
    return result


def attend_rows(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
    """The same for all tokens of packed rows. A token sees the tokens before it in its row.
    q [1, heads, N, d], k and v [1, fewer or as many heads, N, d] -> [1, N, heads, d]. Call it only if `for_rows` is
    true.

    spans: [B, 4] long, for each row: its first token among N; c and s, counted in the row: tokens from s on do not see
    those from c to s; its length
    """
    result: Tensor = _Rows.apply(q, k, v, spans, scale)
    return result


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, spans)
        ctx.scale = scale
        result: Tensor = torch.ops.rlhf.attend_rows(q, k, v, spans, scale)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.rlhf.attend_rows_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


def fits(*operands: Tensor) -> bool:
    """Whether the kernels support the dtype and the last dimension of the operands."""
    return all(x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0) for x in operands)


@functools.cache
def for_one_token(dtype: torch.dtype) -> bool:
    """Whether `products` and `attend` are correct on this machine. The first call compiles them; the binary is cached
    on disk."""
    if dtype not in (torch.float32, torch.bfloat16) or not _compiled():
        return False
    x, weight, q, k, v = random_tensors(dtype, (3, 1, 40), (50, 40), (2, 6, 1, 40), (2, 2, 21, 40), (2, 2, 21, 40))
    visible = torch.arange(21).expand(2, 1, 1, 21) > 2
    try:
        results = products(x, [weight], []), attend(q, k, v, visible, 0.2)
    except RuntimeError:  # oneDNN has no block products for this CPU
        return False
    expected = F.scaled_dot_product_attention(q, k, v, visible, scale=0.2, enable_gqa=True)
    return close(results[0], x @ weight.mT) and close(results[1], expected.transpose(1, 2))


@functools.cache
def for_rows(dtype: torch.dtype) -> bool:
    """Whether `attend_rows` is correct on this machine; only for bf16. The first call compiles it."""
    if dtype != torch.bfloat16 or not _compiled():
        return False
    q, k, v = random_tensors(dtype, (1, 6, 90, 40), (1, 2, 90, 40), (1, 2, 90, 40))
    try:
        result = attend_rows(q, k, v, torch.tensor([[0, 90, 90, 90]]), 0.2)
    except RuntimeError:
        return False
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    return close(result, expected.transpose(1, 2))


def random_tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def close(result: Tensor, expected: Tensor) -> bool:
    """Whether a kernel is right: a mistake of indices is off by more than 0.1, bf16 by less."""
    return torch.allclose(result, expected, rtol=0, atol=1e-4 if result.dtype == torch.float32 else 0.1)


@functools.cache
def _compiled() -> bool:
    """Whether the files in cpp/ compile: as one text, because torch's headers take most of the time."""
    if platform.machine() != "x86_64":
        return False
    from torch._inductor.codecache import CppCodeCache

    folder = Path(__file__).parent / "cpp"
    source = "\n".join((folder / file).read_text(encoding="utf-8") for file in SOURCES)
    try:
        CppCodeCache.load(source, device_type="cpu", extra_flags=("-ftree-loop-vectorize",))
    except (RuntimeError, OSError) as error:
        errors = [line for line in str(error).splitlines() if "error: " in line] or [str(error).strip()]
        warnings.warn(f"{folder} does not compile, so slower operations of torch are used: {errors[0]}", stacklevel=2)
        return False
    register = functools.partial(torch.library.register_fake, allow_override=True)
    register("rlhf::products", products_shape)
    register("rlhf::attend", lambda q, *_: q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3]))
    return True


def products_shape(x: Tensor, weights: list[Tensor], _: list[Tensor]) -> Tensor:
    """The shape of the result of `products`, for a compiler."""
    return x.new_empty(*x.shape[:-1], sum(map(len, weights)))
